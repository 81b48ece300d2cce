"""Executes the steps of a Dockerfile with overlay mounts and chroot, for machines on which no image can be built.

It knows the instructions that our Dockerfile uses and refuses others. Callers run as root in a private mount namespace.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from dockerfile_parse import DockerfileParser

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, kw_only=True)
class Image:
    """File system of a stage, and the settings of its containers."""

    layers: tuple[Path, ...]
    """Folders of the layers, lowest first."""
    key: str
    """Hash of all that the layers depend on."""
    environment: Mapping[str, str] = field(default_factory=lambda: {"PATH": SEARCH_PATH})
    folder: str = "/"
    user: str = "0:0"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    healthcheck: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """Instruction of a Dockerfile, such as `RUN make`."""

    instruction: str
    value: str


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: its base, which is an image or another stage, and the steps on it."""

    name: str
    base: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """Where and with what a Dockerfile is executed."""

    context: Path
    work_folder: Path
    """Folder of the layers, which later builds reuse."""
    base: Image
    """Stands for every image that the Dockerfile names."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Build arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the steps that do not become a part of the image, such as those of a proxy."""
    mounts: Sequence[Path] = ()
    """Files and folders of this machine that the steps can read at the same path, such as a package index."""


def parse_stages(dockerfile: Path) -> list[Stage]:
    """Return the stages of a Dockerfile. Global arguments apply to the names of the bases."""
    with dockerfile.open("rb") as file:
        steps = [
            Step(item["instruction"], item["value"])
            for item in DockerfileParser(fileobj=file).structure
            if item["instruction"] != "COMMENT"
        ]
    stages: list[Stage] = []
    global_arguments: dict[str, str] = {}
    for step in steps:
        if step.instruction == "FROM":
            base, _, name = step.value.partition(" AS ")
            stages.append(Stage(name or str(len(stages)), expand(base, global_arguments), ()))
        elif stages:
            stages[-1] = replace(stages[-1], steps=(*stages[-1].steps, step))
        else:
            global_arguments |= _parse_pairs(step.value, {})
    return stages


def build(dockerfile: Path, targets: Sequence[str], settings: BuildSettings) -> dict[str, Image]:
    """Execute the stages that the targets need, and return the targets' images by name."""
    stages = {stage.name: stage for stage in parse_stages(dockerfile)}
    images: dict[str, Image] = {}

    def build_stage(name: str) -> Image:
        if name not in stages:
            return settings.base
        if name not in images:
            stage = stages[name]
            sources = {
                source: build_stage(source)
                for step in stage.steps
                if step.instruction == "COPY" and (source := _copy_source(step))
            }
            images[name] = _StageBuild(stage, build_stage(stage.base), sources, settings).run()
        return images[name]

    return {target: build_stage(target) for target in targets}


@contextmanager
def mounted(image: Image, mount_point: Path, upper: Path | None = None) -> Iterator[Path]:
    """Mount the file system of an image, read-only or with a folder for what is written."""
    mount_point.mkdir(parents=True, exist_ok=True)
    options = "lowerdir=" + ":".join(map(str, reversed(image.layers)))
    if upper is None:
        # An overlay needs two folders to be mounted without an upper one.
        options = f"ro,{options}" + (f":{_empty_folder(mount_point)}" * (len(image.layers) == 1))
    else:
        work = upper.with_name(f"{upper.name}.work")
        for folder in (upper, work):
            folder.mkdir(parents=True, exist_ok=True)
        options += f",upperdir={upper},workdir={work}"
    run("mount", "-t", "overlay", "overlay", "-o", options, mount_point)
    try:
        yield mount_point
    finally:
        run("umount", "--recursive", mount_point)


def run(*command: str | Path) -> None:
    """Run a command of this machine, which must succeed."""
    subprocess.run(command, check=True)


def in_root(root: Path, image: Image, command: Sequence[str], **more: str) -> list[str]:
    """Return the command that runs another one in a mounted image, as its user and with its variables."""
    user, _, group = image.user.partition(":")
    privileges = ["--reuid", user, "--regid", group or user, "--clear-groups"]
    if user not in {"0", "root"}:
        privileges += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    variables = [f"{name}={value}" for name, value in {**image.environment, **more}.items()]
    return [
        *("chroot", str(root), "/usr/bin/setpriv", *privileges),
        *("/usr/bin/env", "-i", "-C", image.folder, *variables, *command),
    ]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$NAME` and `${NAME}`. A variable that is not set is empty."""
    return VARIABLE.sub(lambda match: variables.get(match[1] or match[2], ""), text)


def context_files(context: Path, source: str) -> list[Path]:
    """Return the files below a path of the context that .dockerignore does not exclude, relative to the context."""
    start = context / source
    files = [start] if start.is_file() else [path for path in start.rglob("*") if path.is_file()]
    ignore_file = context / ".dockerignore"
    lines = ignore_file.read_text(encoding="utf-8").splitlines() if ignore_file.exists() else []
    patterns = [line for line in lines if line and not line.startswith("#")]
    relative = sorted(path.relative_to(context) for path in files)
    return [path for path in relative if not _is_ignored(PurePosixPath(path), patterns)]


class _StageBuild:
    """Execution of the steps of one stage."""

    def __init__(
        self, stage: Stage, base: Image, sources: Mapping[str, Image], settings: BuildSettings
    ) -> None:
        self._stage = stage
        self._image = base
        self._sources = sources
        self._settings = settings
        self._arguments: dict[str, str] = {}
        self._folder = settings.work_folder / stage.name
        self._root = self._folder / "root"

    def run(self) -> Image:
        """Return the image of the stage. Files are only made again if something has changed that they depend on."""
        key, layer, complete = self._key(), self._folder / "layer", self._folder / "complete"
        is_reused = complete.exists() and complete.read_text(encoding="utf-8") == key
        if is_reused:
            self._execute_steps(writes_files=False)
        else:
            shutil.rmtree(self._folder, ignore_errors=True)
            with mounted(self._image, self._root, layer), self._build_mounts():
                self._execute_steps(writes_files=True)
            complete.write_text(key, encoding="utf-8")
        return replace(self._image, layers=(*self._image.layers, layer), key=key)

    def _execute_steps(self, *, writes_files: bool) -> None:
        for number, step in enumerate(self._stage.steps, 1):
            if writes_files:
                position = f"{self._stage.name} {number}/{len(self._stage.steps)}"
                print(f"[{position}] {step.instruction} {step.value}", flush=True)
            self._apply_setting(step)
            if writes_files and step.instruction == "RUN":
                self._run_shell(step.value)
            elif writes_files and step.instruction == "COPY":
                self._copy(step.value)
            elif writes_files and step.instruction == "WORKDIR":
                self._inside(self._image.folder).mkdir(parents=True, exist_ok=True)

    def _apply_setting(self, step: Step) -> None:
        variables = {**self._arguments, **self._image.environment}
        match step.instruction:
            case "ARG":
                defaults = _parse_pairs(step.value, variables)
                given = self._settings.arguments
                self._arguments |= {name: given.get(name, text) for name, text in defaults.items()}
            case "ENV":
                environment = {**self._image.environment, **_parse_pairs(step.value, variables)}
                self._image = replace(self._image, environment=environment)
            case "LABEL":
                labels = {**self._image.labels, **_parse_pairs(step.value, variables)}
                self._image = replace(self._image, labels=labels)
            case "WORKDIR":
                folder = str(PurePosixPath(self._image.folder) / expand(step.value, variables))
                self._image = replace(self._image, folder=folder)
            case "USER":
                self._image = replace(self._image, user=step.value)
            case "VOLUME":
                self._image = replace(self._image, volumes=tuple(json.loads(step.value)))
            case "ENTRYPOINT":
                self._image = replace(self._image, entrypoint=tuple(json.loads(step.value)))
            case "CMD":
                self._image = replace(self._image, command=tuple(json.loads(step.value)))
            case "HEALTHCHECK":
                _, _, command = step.value.partition(" CMD ")
                self._image = replace(self._image, healthcheck=tuple(json.loads(command)))
            case "RUN" | "COPY" | "EXPOSE":
                pass
            case unknown:
                raise ValueError(f"{unknown} is not supported here; add it to this file")

    def _key(self) -> str:
        """Return a hash of the layers below, the steps, the arguments and the files that they copy."""
        digest = hashlib.sha256()
        inputs = [self._image.key, *(image.key for image in self._sources.values())]
        inputs += [f"{step.instruction} {step.value}" for step in self._stage.steps]
        inputs.append(json.dumps(dict(self._settings.arguments), sort_keys=True))
        digest.update("\0".join(inputs).encode())
        for step in self._stage.steps:
            if step.instruction == "COPY" and not _copy_source(step):
                for source in step.value.split()[:-1]:
                    for path in context_files(self._settings.context, source):
                        digest.update(str(path).encode())
                        digest.update((self._settings.context / path).read_bytes())
        return digest.hexdigest()

    @contextmanager
    def _build_mounts(self) -> Iterator[None]:
        run("mount", "-t", "proc", "proc", self._root / "proc")
        run("mount", "--rbind", "/dev", self._root / "dev")
        made: list[Path] = []
        try:
            for path in self._settings.mounts:
                inside = self._inside(str(path))
                if not inside.exists():
                    inside.parent.mkdir(parents=True, exist_ok=True)
                    inside.mkdir() if path.is_dir() else inside.touch()
                    made.append(inside)
                run("mount", "--rbind", path, inside)
            yield
        finally:
            for path in self._settings.mounts:
                run("umount", "--recursive", self._inside(str(path)))
            for inside in made:
                inside.rmdir() if inside.is_dir() else inside.unlink()

    def _run_shell(self, script: str) -> None:
        more = {**self._arguments, **self._settings.environment}
        run(*in_root(self._root, self._image, ["/bin/sh", "-c", script], **more))

    def _copy(self, value: str) -> None:
        source = _copy_source(Step("COPY", value))
        *paths, target = value.split()[1 if source else 0 :]
        if any(path.startswith("--") for path in paths):
            raise ValueError(f"COPY {value}: of its options only --from is supported here")
        destination = self._inside(target)
        if source:
            with mounted(self._sources[source], self._folder / "source") as root:
                destination.mkdir(parents=True, exist_ok=True)
                for path in paths:
                    run("cp", "-a", f"{root / path.lstrip('/')}/.", destination)
            return
        context = self._settings.context
        for path in paths:
            files = context_files(context, path)
            if not files:
                raise FileNotFoundError(f"COPY {value}: the context has no {path}")
            for file in files:
                inside = file.name if (context / path).is_file() else file.relative_to(path)
                (destination / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(context / file, destination / inside)

    def _inside(self, path: str) -> Path:
        """Return the path on this machine of a path in the image, relative to its folder."""
        return self._root / str(PurePosixPath(self._image.folder) / path).lstrip("/")


def _copy_source(step: Step) -> str:
    """Return the stage that a COPY takes files from, or "" for the context."""
    first = step.value.split()[0]
    return first.removeprefix("--from=") if first.startswith("--from=") else ""


def _parse_pairs(value: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the names and values of ARG, ENV and LABEL, which may be quoted and contain variables."""
    pairs = (pair.partition("=") for pair in shlex.split(value))
    return {name: expand(text, variables) for name, _, text in pairs}


def _is_ignored(path: PurePosixPath, patterns: Sequence[str]) -> bool:
    """Return whether .dockerignore excludes a path. The last pattern that matches it or a folder above it decides."""
    ignored = False
    for pattern in patterns:
        glob = pattern.removeprefix("!")
        if any(_matches(part, glob) for part in (path, *path.parents[:-1])):
            ignored = not pattern.startswith("!")
    return ignored


def _matches(path: PurePosixPath, glob: str) -> bool:
    if glob.startswith("**/"):
        return fnmatchcase(path.name, glob.removeprefix("**/"))
    parts = PurePosixPath(glob).parts
    return len(parts) == len(path.parts) and all(map(fnmatchcase, path.parts, parts))


def _empty_folder(mount_point: Path) -> Path:
    folder = mount_point.with_name(f"{mount_point.name}.empty")
    folder.mkdir(exist_ok=True)
    return folder


def require_root() -> None:
    """End the program unless it may mount file systems."""
    if os.geteuid() != 0:
        raise SystemExit("this needs root, for mounts and chroot; run it with sudo")
