"""The wheel has every file of the package, and works where only it and its dependencies are installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import httpx2
import pytest
from tests.support.serve_process import run_serve

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling is not installed (make check installs it)")
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment, which finds its dependencies in that of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # The folder is only searched, so the path file there, which leads to the sources, has no effect.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    # Isolated from the environment, where `make` names a constraints file relative to the repository.
    pip = (sys.executable, "-m", "pip", "--isolated", "--python", folder / "bin/python")
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return folder


def test_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    tracked = run("git", "ls-files", "src/argosy", cwd=ROOT).splitlines()
    expected = {path[4:] for path in tracked}
    with zipfile.ZipFile(wheel) as archive:
        assert expected - set(archive.namelist()) == set()


def test_installed_wheel_serves_the_bundled_model(installed: Path, tmp_path: Path) -> None:
    code = "import argosy; print(argosy.__file__)"
    imported = run(installed / "bin/python", "-c", code, cwd=tmp_path).strip()
    assert Path(imported).is_relative_to(installed)
    assert run(installed / "bin/argosy", "--version", cwd=tmp_path).startswith("argosy 0.")
    with run_serve(program=str(installed / "bin/argosy")) as server:
        with server.client() as client:
            reply = client.chat.completions.create(
                model="argosy-mini", max_tokens=5, messages=[{"role": "user", "content": "Hello!"}]
            )
        console = httpx2.get(server.url, headers={"accept": "text/html"})
    assert reply.choices[0].message.content
    assert (console.status_code, "Argosy" in console.text) == (200, True)
