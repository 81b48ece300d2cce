"""`argosy models`: what a checkpoint is, what memory it needs on this machine, and the removal of unused models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from argosy.cli import model_versions
from argosy.cli.account_lookup import StoreUrl, open_existing_store
from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.quantities import format_count, format_size, parse_size
from argosy.model_store import ModelStoreError, collect_garbage, open_model_store

if TYPE_CHECKING:
    from argosy.engine import AnyArchitecture, StoredIntegers, TemplateCapabilities
    from argosy.fleet.control import UsedModels
    from argosy.store import FleetStore

DTypeName = Literal["auto", "bfloat16", "float32", "float16"]
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

OutputFormat = Literal["table", "json"]

app = typer.Typer(help="Inspect models, and keep them on this machine by their content.")
app.command("pull")(model_versions.pull)
app.command("list")(model_versions.list_models)
app.command("show")(model_versions.show)
app.command("verify")(model_versions.verify)
app.command("promote")(model_versions.promote)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """Properties of a model and its memory plan on this machine. Sizes are in bytes."""

    path: str
    family: str
    architecture: str
    output: str
    """Description of what the model computes, such as text or embeddings."""
    parameters: int
    active_parameters: int
    vocab_size: int
    max_model_len: int
    dtype: str
    stored_format: str
    """Form of a quantized checkpoint whose integers a CPU computes with. Empty for others."""
    weight_bytes: int
    """Size of the loaded weights."""
    checkpoint_bytes: int
    """Size of the weight files on disk."""
    kv_bytes_per_token: int
    kv_bytes_per_sequence: int
    """KV cache of a sequence of full context length, of which sliding windows need only the last tokens."""
    free_bytes: int
    """Memory that is available now, or the memory given with `--memory`."""
    kv_cache_bytes: int
    """Planned size of the KV cache after the weights are loaded."""
    kv_tokens: int
    """Tokens that fit in the KV cache as sequences of full context length."""
    full_sequences: int
    """Sequences of full context length that fit at the same time."""
    chat_template: str = "none"
    """File of the chat template."""
    chat_template_takes: Mapping[str, Any] | None = None
    """Capabilities of the template (`TemplateCapabilities`), in requests without tools and with tools."""


@app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """Inspect the bundled model if no subcommand is given."""
    if context.invoked_subcommand is None:
        inspect_model()


@app.command("inspect")
def inspect_model(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A directory, a GGUF file, or a name on the hub; by default the bundled model."
        ),
    ] = None,
    *,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    dtype: Annotated[DTypeName, typer.Option(help="Data type of weights and KV cache.")] = "auto",
    memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Plan for this much memory instead of this machine's.",
        ),
    ] = None,
    output: Annotated[OutputFormat, typer.Option(help="Output format.")] = "table",
) -> None:
    """Show a model's properties and what fits in memory. Own families need torch only if they are quantized."""
    from argosy.engine import (
        ChatTemplate,
        find_stored_integers,
        read_any_architecture,
        resolve_model_path,
    )
    from argosy.models import BUNDLED_MODEL

    try:
        path = resolve_model_path(model or str(BUNDLED_MODEL), revision)
        architecture = read_any_architecture(path)
        stored = find_stored_integers(path, architecture)
        fit = compute_model_fit(path, architecture, dtype, memory, stored)
        template = ChatTemplate.load(path)
    except ValueError as error:
        fail(str(error))
    takes: list[TemplateCapabilities] = []
    if template.source is not None:
        takes = [template.capabilities(with_tools=with_tools) for with_tools in (False, True)]
    if output == "json":
        described = {
            name: can.as_dict() for name, can in zip(("plain", "tools"), takes, strict=False)
        }
        fit = replace(fit, chat_template=template.origin, chat_template_takes=described or None)
        typer.echo(json.dumps(asdict(fit)))
    else:
        _print_fit(fit, _describe_template(template.origin, *takes[1:]))


def compute_model_fit(
    path: Path,
    spec: AnyArchitecture,
    dtype: DTypeName,
    memory_bytes: int | None,
    stored: StoredIntegers | None = None,
) -> ModelFit:
    """Compute the memory that the model takes. `auto` is bfloat16, and the default memory is what is free."""
    import psutil

    from argosy.engine import DEFAULT_KV_MEMORY_FRACTION, read_pooling_layout, weight_files

    planned_dtype = dtype if dtype != "auto" else "bfloat16"
    dtype_bytes = DTYPE_BYTES[planned_dtype]
    sequence_bytes = spec.kv_bytes_per_sequence(dtype_bytes)
    free = int(psutil.virtual_memory().available) if memory_bytes is None else memory_bytes
    weight_bytes = spec.num_parameters * dtype_bytes
    if stored is not None:
        weight_bytes += stored.num_bytes - stored.num_weights * dtype_bytes
    cache, full_sequences = 0, 0.0
    if sequence_bytes:  # encoders have no KV cache
        cache = max(int((free - weight_bytes) * DEFAULT_KV_MEMORY_FRACTION), 0)
        full_sequences = cache / sequence_bytes
    layout = read_pooling_layout(path)
    return ModelFit(
        path=str(path),
        family=spec.family,
        architecture=spec.architecture,
        output="text" if layout is None else layout.describe(),
        parameters=spec.num_parameters,
        active_parameters=spec.num_active_parameters,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        dtype=planned_dtype,
        stored_format="" if stored is None else stored.description,
        weight_bytes=weight_bytes,
        checkpoint_bytes=sum(file.stat().st_size for file in weight_files(path)),
        kv_bytes_per_token=spec.kv_bytes_per_token(dtype_bytes),
        kv_bytes_per_sequence=sequence_bytes,
        free_bytes=free,
        kv_cache_bytes=cache,
        kv_tokens=int(full_sequences * spec.max_model_len),
        full_sequences=int(full_sequences),
    )


def _describe_template(
    origin: str, can: TemplateCapabilities | None = None
) -> list[tuple[str, str]]:
    """Return rows about the chat template, and about what it takes in requests with tools."""
    name = Path(origin).name
    if can is None:
        return [("chat template", name)]
    forms = {"text": "text", "any": "text or parts", "parts": "parts", "part": "one part"}
    late = " or ".join(sorted(can.late_system))
    later = f"later ones after {late}" if late else "later ones are moved there"
    start = {"several": "several", "one": "one", "none": "none, made the user's"}[can.system]
    calls = f"arguments as {can.arguments}, {'several' if can.takes_parallel_calls else 'one'} in a message"
    return [
        ("chat template", name),
        ("content", ", ".join(f"{role} as {forms[form]}" for role, form in can.content.items())),
        ("system messages", f"{start} at the start; {later}"),
        ("twice in a row", ", ".join(sorted(can.repeatable)) or "no role, merged"),
        (
            "answer before a question",
            ", ".join(sorted(can.welcome)) or "after an empty user message",
        ),
        ("tool calls", calls if can.shows_calls else "as texts"),
        ("earlier reasoning", f"{can.reasoning} shown"),
        ("reasoning variables", ", ".join(sorted(can.variables)) or "none"),
        (
            "shows every message",
            "yes" if can.shows_every_message else "no; the response names the rest",
        ),
    ]


def _print_fit(fit: ModelFit, template_rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    all_active = fit.active_parameters == fit.parameters
    active = "" if all_active else f" ({format_count(fit.active_parameters)} active)"
    table = Table(title=fit.path, show_header=False, title_justify="left")
    memory = ("memory available", format_size(fit.free_bytes))
    has_kv_cache = fit.kv_bytes_per_sequence > 0
    kv_rows = [("KV cache", "none"), memory]
    if has_kv_cache:
        kv_rows = [
            ("KV cache per token", format_size(fit.kv_bytes_per_token)),
            ("KV cache of a full context", format_size(fit.kv_bytes_per_sequence)),
            memory,
            ("of it for the KV cache", format_size(fit.kv_cache_bytes)),
            ("tokens that fit", f"{fit.kv_tokens:,}"),
            ("sequences at full context", f"{fit.full_sequences:,}"),
        ]
    for name, value in (
        ("family", f"{fit.family} ({fit.architecture})"),
        ("computes", fit.output),
        ("parameters", format_count(fit.parameters) + active),
        ("vocabulary", f"{fit.vocab_size:,} tokens"),
        ("context", f"{fit.max_model_len:,} tokens"),
        ("weight files", format_size(fit.checkpoint_bytes)),
        (
            f"weights in {' and '.join(filter(None, (fit.dtype, fit.stored_format)))}",
            format_size(fit.weight_bytes),
        ),
        *kv_rows,
        *template_rows,
    ):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    if fit.weight_bytes >= fit.free_bytes:
        console.print("[red]The weights alone do not fit in memory.[/red]")
    elif has_kv_cache and not fit.full_sequences:
        console.print(
            "No sequence of full context length fits; serve the model with a smaller --max-model-len."
        )


@app.command("gc")
def collect_unused(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    store: StoreUrl = None,
) -> None:
    """Remove retired versions that no fleet of the store and no running replica uses, and files without a model."""
    try:
        with _open_fleets(store) as fleets:
            used = None if fleets is None else _find_used(fleets)
        garbage = collect_garbage(
            open_model_store(),
            used_digests=() if used is None else used.digests,
            used_sources=() if used is None else used.urls,
            is_dry_run=dry_run,
        )
    except ModelStoreError as error:
        fail(str(error), EXIT_FAILURE)
    for digest, reason in garbage.used.items():
        typer.echo(f"keeps {digest}: {reason}")
    verb = "would remove" if dry_run else "removed"
    for version in garbage.versions:
        typer.echo(f"{verb} {version.name} {version.digest} ({format_size(version.size)})")
    for digest in garbage.models:
        typer.echo(f"{verb} {digest}, which has no name")
    typer.echo(
        f"{verb} {garbage.blobs} files and {garbage.partial_files} interrupted downloads, {format_size(garbage.size)}"
    )


def _find_used(fleets: FleetStore) -> UsedModels:
    from argosy.fleet.control import find_used_models

    try:
        return find_used_models(fleets)
    except ValueError as error:
        fail(
            f"{error} Nothing was removed, since the models of the fleets are unknown.",
            EXIT_FAILURE,
        )


@contextmanager
def _open_fleets(url: str | None) -> Iterator[FleetStore | None]:
    """Open the fleets of a store, or None if the default store was never created."""
    from argosy.store import default_store_url, sqlite_path

    path = sqlite_path(url or default_store_url())
    if url is None and path is not None and not path.exists():
        yield None
        return
    with open_existing_store(url) as store:
        yield store.fleets
