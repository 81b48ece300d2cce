"""`argosy models pull|list|show|verify|promote`: the models on this machine, by their digest."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.output import JsonOutput, format_one_line, print_records
from argosy.cli.quantities import format_size
from argosy.model_store import (
    DIGEST_PREFIX,
    FileHashes,
    Manifest,
    ModelMismatchError,
    ModelStore,
    ModelStoreError,
    ModelVersion,
    PullObserver,
    SourceFile,
    Stage,
    compute_manifest,
    list_model_files,
    open_model_store,
    pull_model,
    verify_model,
)
from argosy.progress_bar import ProgressBar

NOTHING_STORED = (
    "No model is stored. Add one with `argosy models pull`; `argosy models inspect` shows the bundled"
    " one."
)
SHOWN_DIGITS = 12
"""Digits of a digest that lists show. Commands accept as many."""
Reference = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="NAME (its stable version, else the newest candidate), NAME:STAGE, or sha256:DIGITS.",
    ),
]


def pull(
    source: Annotated[
        str,
        typer.Argument(
            help="A directory, a GGUF file, a name on the hub, or a URL such as s3://bucket/model."
        ),
    ],
    *,
    name: Annotated[
        str | None, typer.Option(help="Name of the model. Default: the last part of the source.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    digest: Annotated[
        str | None, typer.Option(help="Digest that the model must have (sha256:...).")
    ] = None,
    licence: Annotated[
        str | None, typer.Option(help="Licence, instead of that of the model card.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Base model, instead of that of the model card.")
    ] = None,
    link: Annotated[
        bool,
        typer.Option(
            "--link",
            help="Link the files of a directory instead of copying them. Do not change them in place later.",
        ),
    ] = False,
    parallel: Annotated[int, typer.Option(min=1, max=64, help="Files fetched at once.")] = 8,
    json: JsonOutput = False,
) -> None:
    """Download a model into the store of this machine, or continue to. Its files are verified and kept once."""
    try:
        with _PullProgress() as progress:
            version = pull_model(
                open_model_store(),
                source,
                name=name,
                revision=revision,
                digest=digest,
                licence=licence,
                base_model=base_model,
                links_files=link,
                parallel_files=parallel,
                observer=progress,
            )
    except ModelStoreError as error:
        fail(str(error), EXIT_FAILURE)
    _print_version(open_model_store(), version, json=json)


def list_models(*, json: JsonOutput = False) -> None:
    """List the models of the store."""
    try:
        versions = open_model_store().list_versions()
    except ModelStoreError as error:
        fail(str(error), EXIT_FAILURE)
    if json:
        _print_json(versions)
        return
    print_records(
        versions,
        ("model", "stage", "digest", "size", "pulled", "source", "revision"),
        lambda version: (
            version.name,
            version.stage,
            version.digest[: len(DIGEST_PREFIX) + SHOWN_DIGITS],
            format_size(version.size),
            _format_time(version.pulled_at),
            version.source,
            version.revision[:SHOWN_DIGITS],
        ),
        NOTHING_STORED,
        json=False,
    )


def show(
    model: Reference,
    *,
    manifest: Annotated[
        bool,
        typer.Option(
            "--manifest",
            help="Print the manifest only. As `argosy.manifest` beside the files it lets others verify them.",
        ),
    ] = False,
    json: JsonOutput = False,
) -> None:
    """Show a version of a model with its files."""
    store = open_model_store()
    try:
        version = store.find(model)
        if manifest:
            typer.echo(_require_manifest(store, version).encode(), nl=False)
        else:
            _print_version(store, version, json=json)
    except ModelStoreError as error:
        fail(str(error), EXIT_FAILURE)


def verify(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Models of the store as in `show`, or paths of directories and GGUF files. Default: the whole store.",
        ),
    ] = None,
    *,
    digest: Annotated[
        str | None,
        typer.Option(help="Digest that a path must have. Without it the digest is printed."),
    ] = None,
) -> None:
    """Read every byte of models and compare it with their digests. Fails if a file is damaged, and names it."""
    store, hashes = open_model_store(), FileHashes(is_trusting=False)
    damaged = False
    try:
        named = models or sorted({version.digest for version in store.list_versions()})
        if not named:
            typer.echo(NOTHING_STORED)
        for each in named:
            try:
                typer.echo(_verify(store, hashes, each, digest))
            except ModelMismatchError as error:
                damaged = True
                typer.secho(f"damaged: {error}", err=True, fg=typer.colors.RED)
    except ModelStoreError as error:
        fail(str(error), EXIT_FAILURE)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}. Check its permissions.", EXIT_FAILURE)
    if damaged:
        raise typer.Exit(EXIT_FAILURE)


def promote(
    model: Reference,
    *,
    to: Annotated[Stage, typer.Option(help="New stage.")] = "stable",
) -> None:
    """Give a version another stage. The version that was stable retires when another one becomes stable."""
    store = open_model_store()
    try:
        for version in store.promote(store.find(model), to):
            typer.echo(f"{version.name} {version.digest} is {version.stage}")
    except ModelStoreError as error:
        fail(str(error), EXIT_FAILURE)


def _verify(store: ModelStore, hashes: FileHashes, model: str, digest: str | None) -> str:
    """Verify one model and return what to print about it."""
    path = Path(model).expanduser()
    if path.exists():
        if digest is None:
            found = compute_manifest(list_model_files(path), hashes=hashes).digest
            return f"{path} has the digest {found}"
        verify_model(path, digest, hashes=hashes, store=store)
        return f"{path} is {digest}"
    version = store.find(model)
    folder = store.model_path(version.digest)
    if folder is None:
        raise ModelMismatchError(
            store.model_folder(version.digest), version.digest, "it is missing"
        )
    verify_model(folder, version.digest, hashes=hashes, store=store)
    return f"{version.name} {version.digest} is intact ({format_size(version.size)})"


def _print_version(store: ModelStore, version: ModelVersion, *, json: bool) -> None:
    manifest, path = _require_manifest(store, version), store.model_path(version.digest)
    if json:
        _print_json(msgspec.to_builtins(version) | {"path": str(path), "files": manifest.files})
        return
    fields = {
        "model": version.name,
        "digest": version.digest,
        "stage": version.stage,
        "source": version.source,
        "revision": version.revision,
        "licence": version.licence,
        "base model": version.base_model,
        "tokenizer": version.tokenizer_digest,
        "pulled": _format_time(version.pulled_at),
        "path": str(path),
        "size": f"{format_size(version.size)} in {len(manifest.files)} files",
    }
    lines = [f"{label:10}  {format_one_line(value)}" for label, value in fields.items() if value]
    files = [
        f"{file.sha256[:SHOWN_DIGITS]}  {format_size(file.size):>10}  {file.path}"
        for file in manifest.files
    ]
    typer.echo("\n".join([*lines, "", *files]))


def _print_json(value: object) -> None:
    """Print JSON. Unlike keys of clients, models show their digests."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


def _require_manifest(store: ModelStore, version: ModelVersion) -> Manifest:
    manifest = store.read_manifest(version.digest)
    if manifest is None:
        raise ModelStoreError(f"the manifest of {version.name} is missing. Pull the model again.")
    return manifest


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


class _PullProgress(ProgressBar, PullObserver):
    """Progress of a download."""

    def __init__(self) -> None:
        super().__init__("looking for files")
        self._total_bytes = 0

    def on_wait(self) -> None:
        self.console.print("argosy: another process downloads this model; waiting for it")

    def on_files(self, files: Iterable[SourceFile]) -> None:
        sizes = [file.size for file in files]
        self._total_bytes = sum(sizes)
        self.restart(f"{len(sizes)} files", self._total_bytes)

    def on_bytes(self, count: int) -> None:
        self.update(advance=count)
        self.update(note=f"{format_size(self.completed)} of {format_size(self._total_bytes)}")
