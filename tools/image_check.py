"""Executes the Dockerfile's steps without a builder of images, starts the results as containers, and checks them.

    sudo .venv/bin/python -m tools.image_check

The base image is a minimal Debian by debootstrap with its own Python. A container is a process in its own namespaces.
It is process 1, has the image's user and no capabilities, and its root file system is read-only.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from tools.dockerfile_steps import BuildSettings, Image, build, in_root, mounted, require_root, run

REPOSITORY = Path(__file__).parents[1]
DOCKERFILE = REPOSITORY / "deploy/container/Dockerfile"
PRIVATE_VARIABLE = "ARGOSY_IMAGE_CHECK_IS_PRIVATE"
CLONE_NEWNET = 0x40000000
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
DEVICES = ("null", "zero", "full", "random", "urandom")
CA_FILE = Path("/etc/ssl/certs/ca-certificates.crt")
GATEWAY_FILE = """\
auth: {mode: disabled}
models: [{name: argosy-mini, replicas: [{url: "http://127.0.0.1:8001"}]}]
"""
FLEET_FILE = """\
gateways: 0
models: [{name: chat, source: argosy-mini}]
"""


class CheckError(Exception):
    """An image does not do what it should."""


class Container:
    """A process of an image in namespaces of its own."""

    def __init__(self, image: Image, root: Path, process: subprocess.Popen[bytes]) -> None:
        self._image = image
        self._root = root
        self._process = process

    @classmethod
    @contextmanager
    def start(
        cls, image: Image, folder: Path, config: Path, command: Sequence[str] = ()
    ) -> Iterator[Self]:
        """Start a container. Its volumes are empty, and `config` is its folder /etc/argosy."""
        with mounted(image, folder) as root:
            for volume in (*image.volumes, "/tmp"):  # noqa: S108 - of the container
                run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", root / volume.lstrip("/"))
            run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", root / "dev")
            for name in (*DEVICES, "shm"):
                target = root / "dev" / name
                target.mkdir() if name == "shm" else target.touch()
                run("mount", "--bind", f"/dev/{name}", target)
            run("mount", "--bind", config, root / "etc/argosy")
            run("mount", "-o", "remount,bind,ro", root / "etc/argosy")
            arguments = [*image.entrypoint, *(command or image.command)]
            process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL"),
                    *(f"--mount-proc={root / 'proc'}", *in_root(root, image, arguments)),
                ]
            )
            container = cls(image, root, process)
            try:
                yield container
            finally:
                process.kill()
                process.wait()

    def wait_until_healthy(self) -> float:
        """Run the health check until it succeeds, and return the seconds."""
        start = time.monotonic()
        while self.execute(self._image.healthcheck):
            if self._process.poll() is not None:
                raise CheckError(f"the container ended with status {self._process.returncode}")
            if time.monotonic() > start + START_TIMEOUT_S:
                raise CheckError("the health check never succeeded")
            time.sleep(0.5)
        return time.monotonic() - start

    def execute(self, command: Sequence[str]) -> int:
        """Run a command in the container without its output, and return the exit status."""
        return subprocess.run(
            in_root(self._root, self._image, command), check=False, capture_output=True
        ).returncode

    def check_privileges(self) -> None:
        """Check that the process is process 1, has no privileges, and can change none of its files."""
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{self._pid}/status").read_text(encoding="utf-8").splitlines()
            if ":\t" in line
        )
        found = (status["Uid"], status["NSpid"].split()[-1], status["NoNewPrivs"])
        user = self._image.user.partition(":")[0]
        if found != ("\t".join([user] * 4), "1", "1"):
            raise CheckError(f"user, process id and NoNewPrivs are {found}")
        if any(int(status[name], 16) for name in ("CapEff", "CapBnd", "CapAmb")):
            raise CheckError("the process has capabilities")
        for path in ("/opt/argosy/new", "/etc/argosy/new", "/usr/new"):
            if self.execute(["touch", path]) == 0:
                raise CheckError(f"{path} could be written")

    def files_in(self, folder: str) -> list[str]:
        """Return the files below a folder of the container."""
        start = self._root / folder.lstrip("/")
        return sorted(str(path.relative_to(start)) for path in start.rglob("*") if path.is_file())

    def stop(self) -> float:
        """Send SIGTERM, and return the seconds until the process has ended, with status 0 or that of the signal."""
        start = time.monotonic()
        os.kill(self._pid, signal.SIGTERM)
        status = self._process.wait(STOP_TIMEOUT_S)
        if status not in {0, 128 + signal.SIGTERM}:
            raise CheckError(f"the container ended with status {status}")
        return time.monotonic() - start

    @property
    def _pid(self) -> int:
        """Id of process 1 of the container, outside."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        return int(children[0])


def check_images(images: dict[str, Image], work_folder: Path) -> None:
    """Start containers of the images, and check them.

    Raises:
        CheckError: An image does not do what it should.
    """
    config = work_folder / "config"
    config.mkdir(exist_ok=True)
    (config / "gateway.yaml").write_text(GATEWAY_FILE, encoding="utf-8")
    (config / "fleet.yaml").write_text(FLEET_FILE, encoding="utf-8")
    replica, gateway = images["replica"], images["gateway"]
    folder = work_folder / "containers"
    with Container.start(replica, folder / "replica", config) as container:
        _check_running(container, "replica")
        _report("replica stops", f"{container.stop():.1f} s")
    with ExitStack() as stack:
        command = ["replica", "--host", "127.0.0.1", "--port", "8001"]
        stack.enter_context(Container.start(replica, folder / "replica", config, command))
        front = stack.enter_context(Container.start(gateway, folder / "gateway", config))
        _check_running(front, "gateway")
        _report("gateway stops", f"{front.stop():.1f} s")
    with Container.start(gateway, folder / "controller", config, ["controller"]) as container:
        _wait_for(lambda: "argosy/argosy.db" in container.files_in("/state"))
        container.check_privileges()
        _report("controller stops", f"{container.stop():.1f} s")


def _check_running(container: Container, name: str) -> None:
    _report(f"{name} is healthy after", f"{container.wait_until_healthy():.1f} s")
    container.check_privileges()
    _wait_for(lambda: _is_ok("/ready"))
    answer = _complete()
    _report(f"{name} completes", repr(answer["choices"][0]["text"]))
    compiled = [file for file in container.files_in("/cache") if file.endswith(".so")]
    if compiled:
        raise CheckError(f"{name} compiled {compiled}; the image should contain it")


def _complete() -> dict[str, Any]:
    body = {"model": "argosy-mini", "prompt": "The sea is", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        "http://127.0.0.1:8000/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310 - loopback
        answer: dict[str, Any] = json.load(response)
    return answer


def _is_ok(path: str) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:8000{path}", timeout=5).close()
    except OSError:
        return False
    return True


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise CheckError("it took too long")
        time.sleep(0.5)


def _report(subject: str, value: str) -> None:
    print(f"{subject}: {value}", flush=True)


def make_base(folder: Path, suite: str, mirror: str | None) -> Image:
    """Return an image that stands for `python:3-slim`: a minimal Debian with its Python."""
    if not (folder / "complete").exists():
        if shutil.which("debootstrap") is None:
            raise SystemExit("this needs debootstrap; install the package of this name")
        shutil.rmtree(folder, ignore_errors=True)
        include = "--include=python3,python3-venv,ca-certificates"
        target = folder / "root"
        run("debootstrap", "--variant=minbase", include, suite, target, *filter(None, [mirror]))
        for name in ("python", "python3"):
            (target / "usr/local/bin" / name).symlink_to("/usr/bin/python3")
        (folder / "complete").touch()
    return Image(layers=(folder / "root",), key=f"debootstrap {suite}")


def main() -> None:
    """Build and check the images."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work-folder", type=Path, default=REPOSITORY / "build/image")
    parser.add_argument("--suite", default="bookworm", help="Debian release of the base")
    parser.add_argument("--mirror", help="Debian mirror for debootstrap")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--mount",
        action="append",
        default=[],
        type=Path,
        help="file or folder that the steps can read, such as a local package index",
    )
    options = parser.parse_args()
    require_root()
    if PRIVATE_VARIABLE not in os.environ:
        command = ["unshare", "--mount", "--propagation", "private", sys.executable]
        os.environ[PRIVATE_VARIABLE] = "1"
        os.execvp(command[0], [*command, "-m", "tools.image_check", *sys.argv[1:]])  # noqa: S606 - itself
    settings = BuildSettings(
        context=REPOSITORY,
        work_folder=options.work_folder / "stages",
        base=make_base(options.work_folder / "base", options.suite, options.mirror),
        arguments=dict(each.split("=", 1) for each in options.build_arg),
        environment={key: value for key, value in os.environ.items() if key.startswith("PIP_")},
        mounts=[path for path in (CA_FILE, *options.mount) if path.exists()],
    )
    images = build(DOCKERFILE, ("replica", "gateway"), settings)
    # From here on there is no network but a loopback interface that nothing else uses.
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace")
    run("ip", "link", "set", "lo", "up")
    try:
        check_images(images, options.work_folder)
    except CheckError as error:
        raise SystemExit(f"image check failed: {error}") from None
    print("The images do what they should.")


if __name__ == "__main__":
    main()
