"""`argosy backup`: make, check and restore backups of an installation."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argosy.cli.account_lookup import StoreUrl, open_existing_store
from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.output import JsonOutput, print_json, print_records
from argosy.cli.quantities import format_dollars, format_size, format_timestamp

if TYPE_CHECKING:
    from argosy.backup import BackupManifest, BackupTarget, CheckedBackup
    from argosy.blob_store import BlobStore

app = typer.Typer(
    help="Backups of store and series, as sets that are checked and restored as a whole.",
    no_args_is_help=True,
)
TargetUrl = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="Folder, or URL of an object store like s3://bucket/name."
    ),
]
BackupReference = Annotated[
    str | None,
    typer.Argument(
        metavar="BACKUP", help="Id of a backup or its beginning; by default the newest."
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File with a random key for the secrets of the store; without it they are not in the backup.",
    ),
]
Blobs = Annotated[
    str | None,
    typer.Option(
        envvar="ARGOSY_BLOBS",
        metavar="PLACE",
        help="Folder or URL of contents of files, as in store.blobs; by default the folder beside an SQLite store.",
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option(
        help="Also start a gateway and a replica on the restored store, and send this prompt."
    ),
]
Answer = Annotated[
    str | None, typer.Option(help="Expected answer to the prompt, of at most 16 tokens.")
]
PromptModel = Annotated[
    str | None,
    typer.Option("--model", help="Model that answers the prompt; by default the bundled one."),
]


@app.command()
def create(
    target: TargetUrl,
    *,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Number of backups to keep in TARGET. Older ones are deleted."),
    ] = None,
    key_file: KeyFile = None,
    blobs: Blobs = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Back up store, files, series of this machine's gateways and versions of models, while all run on."""
    from argosy.backup import (
        BackupTarget,
        change_status,
        create_backup,
        delete_old_backups,
        read_cipher,
    )

    os.umask(0o077)
    with open_existing_store(store) as opened_store:
        opened_target = BackupTarget(target)
        backup_id, manifest = create_backup(
            opened_store,
            opened_target,
            series_folder=_series_folder(),
            blobs=_open_blobs(blobs, store),
            cipher=read_cipher(key_file),
        )
        created_at = manifest.created_at
        change_status(opened_store.fleets, lambda status: status.with_backup(created_at))
        deleted = [] if keep is None else delete_old_backups(opened_target, keep)
    if json:
        print_json(manifest, id=backup_id)
        return
    typer.echo(backup_id)
    removed = f" {len(deleted)} older ones were deleted." if deleted else ""
    typer.echo(
        f"{_describe(manifest)} in {manifest.duration_s:.1f} s.{removed} Check it with `argosy backup verify`.",
        err=True,
    )


@app.command("list")
def list_backups(target: TargetUrl, *, json: JsonOutput = False) -> None:
    """List the backups, from old to new."""
    import msgspec

    from argosy.backup import BackupError, BackupTarget

    try:
        manifests = BackupTarget(target).read_manifests()
    except ValueError as error:
        fail(str(error))
    rows: list[dict[str, Any]] = [
        {"id": backup_id, "problem": str(found)}
        if isinstance(found, BackupError)
        else {"id": backup_id, "size_bytes": found.size_bytes} | msgspec.to_builtins(found)
        for backup_id, found in manifests.items()
    ]
    print_records(
        rows,
        ("Backup", "Created", "Version", "Size", "Requests", "Cost", "Problem"),
        lambda row: (
            row["id"],
            *(
                ("", "", "", "", "", row["problem"])
                if "problem" in row
                else (
                    format_timestamp(row["created_at"]),
                    row["version"],
                    format_size(row["size_bytes"]),
                    f"{row['requests']:,}",
                    format_dollars(row["nano_dollars"]),
                    "",
                )
            ),
        ),
        "There is no backup.",
        json=json,
    )


@app.command()
def verify(
    target: TargetUrl,
    backup: BackupReference = None,
    *,
    prompt: Prompt = None,
    answer: Answer = None,
    model: PromptModel = None,
    key_file: KeyFile = None,
    json: JsonOutput = False,
) -> None:
    """Restore a backup into a scratch folder, and compare every byte, the audit log and the ledger."""
    from argosy.backup import BackupTarget

    try:
        opened_target = BackupTarget(target)
        backup_id = opened_target.find_id(backup)
        checked, duration_s = _check(opened_target, backup_id, prompt, answer, model, key_file)
    except ValueError as error:
        fail(str(error), EXIT_FAILURE)
    if json:
        print_json({"id": backup_id, "problems": checked.problems, "duration_s": duration_s})
    if checked.problems:
        fail(" ".join(checked.problems), EXIT_FAILURE)
    if not json:
        typer.echo(
            f"{backup_id} is whole: {_describe(checked.manifest)}, checked in {duration_s:.1f} s."
        )


@app.command()
def drill(
    target: TargetUrl,
    *,
    prompt: Prompt = None,
    answer: Answer = None,
    model: PromptModel = None,
    key_file: KeyFile = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Verify the newest backup, and record in the store whether it passed, for metrics and alerts."""
    from argosy.backup import BackupTarget, DrillResult, change_status

    with open_existing_store(store) as opened_store:
        started_at, backup_id, created_at, problem = time.time(), "", time.time(), ""
        try:
            opened_target = BackupTarget(target)
            backup_id = opened_target.find_id(None)
            created_at = opened_target.read_manifest(backup_id).created_at
            checked, _ = _check(opened_target, backup_id, prompt, answer, model, key_file)
            problem = " ".join(checked.problems)
        except ValueError as error:
            problem = str(error)
        result = DrillResult(
            at=time.time(),
            backup_id=backup_id,
            problem=problem,
            restore_s=time.time() - started_at,
            backup_age_s=started_at - created_at,
        )
        change_status(opened_store.fleets, lambda status: status.with_drill(result))
    if json:
        print_json(result)
    if problem:
        fail(problem, EXIT_FAILURE)
    if not json:
        typer.echo(
            f"{backup_id} was restored and checked in {result.restore_s:.1f} s. A loss of the store would have cost the"
            f" last {result.backup_age_s:.0f} s."
        )


@app.command()
def restore(
    target: TargetUrl,
    backup: BackupReference = None,
    *,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Rename the files of an SQLite store and of series that exist."
        ),
    ] = False,
    key_file: KeyFile = None,
    blobs: Blobs = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """Restore a backup into a new or empty store, with files and series, after every byte was checked."""
    from argosy.backup import BackupTarget, read_cipher, restore_backup
    from argosy.store import default_store_url

    os.umask(0o077)
    try:
        opened_target = BackupTarget(target)
        restored = restore_backup(
            opened_target,
            opened_target.find_id(backup),
            store or default_store_url(),
            series_folder=_series_folder(),
            blobs=_open_blobs(blobs, store),
            cipher=read_cipher(key_file),
            replaces=replace,
        )
    except ValueError as error:
        fail(str(error))
    if json:
        print_json(restored)
        return
    for file in restored.moved:
        typer.echo(f"What was there before is in {file}.", err=True)
    for version in restored.missing_models:
        typer.echo(
            f"The model {version.name} ({version.digest}) is not on this machine. Pull it from {version.source}.",
            err=True,
        )
    if not restored.has_secrets:
        typer.echo(
            "The secrets of the store are not restored. Gateways make new ones, and cannot read the encrypted reasoning"
            " of earlier responses that clients send.",
            err=True,
        )
    typer.echo(
        f"{restored.backup_id} of {format_timestamp(restored.manifest.created_at, 'seconds')} is restored in"
        f" {restored.duration_s:.1f} s: {restored.rows:,} rows, {_describe(restored.manifest)}."
    )


def _check(
    target: BackupTarget,
    backup_id: str,
    prompt: str | None,
    answer: str | None,
    model: str | None,
    key_file: Path | None,
) -> tuple[CheckedBackup, float]:
    """Check a backup in a scratch folder, also by a prompt if one is given. Returns also how long it took in s."""
    from argosy.backup import answer_prompt, check_backup, read_cipher

    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="argosy-verify-") as scratch:
        checked = check_backup(target, backup_id, Path(scratch), read_cipher(key_file))
        if prompt is not None and not checked.problems:
            given = answer_prompt(checked.store_url, prompt, model)
            typer.echo(f"The restored gateway answers {given!r}.", err=True)
            if answer not in {None, given}:
                checked.problems.append(f"The answer to the prompt is {given!r}.")
    return checked, time.monotonic() - started_at


def _series_folder() -> Path:
    from argosy.folders import state_folder

    try:
        return state_folder() / "series"
    except FileNotFoundError as error:
        fail(str(error))


def _open_blobs(place: str | None, store: str | None) -> BlobStore | None:
    """Open the contents of files at a place, or else beside an SQLite store. Raises BlobStoreError."""
    from argosy.blob_store import check_location, open_blob_store
    from argosy.store import default_blob_folder, default_store_url

    if place is not None:
        check_location(place)
    place = place or default_blob_folder(store or default_store_url())
    return None if place is None else open_blob_store(place)


def _describe(manifest: BackupManifest) -> str:
    series = sum(part.kind == "series" for part in manifest.parts)
    return (
        f"{format_size(manifest.size_bytes)}, {manifest.requests:,} requests for"
        f" {format_dollars(manifest.nano_dollars)}, {manifest.audit_entries:,} entries of the audit log,"
        f" {manifest.files:,} files, {series} series"
    )
