"""`argosy quality`: golden sets, and runs that grade a model by one and compare it with another model."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argosy.cli.account_lookup import (
    OrganisationFilterOption,
    StoreUrl,
    account_names,
    audit_actor,
    find_id,
    find_organisation,
    format_owner,
    open_existing_store,
    open_or_create_store,
)
from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.output import JsonOutput, print_json, print_records
from argosy.cli.server_client import (
    DEFAULT_URL,
    ServerApiKey,
    ServerUrl,
    fail_without_server,
    open_client,
)

if TYPE_CHECKING:
    import httpx2

    from argosy.quality import GoldenSet, RunResult, RunSummary
    from argosy.store import QualitySet, Store

app = typer.Typer(help="Golden sets, and comparisons of models by them.", no_args_is_help=True)
EXIT_WORSE = 3
"""Exit status of a run whose model is worse, or scores less than it shall."""
EXIT_UNDECIDED = 4
"""Exit status of a comparison without enough evidence."""
SetArgument = Annotated[
    str,
    typer.Argument(
        metavar="SET", help="NAME (its latest version), NAME@NUMBER or id in the store, or a file."
    ),
]


@app.command("import")
def import_set(
    name: Annotated[str, typer.Argument(help="Name of the set.")],
    file: Annotated[
        Path,
        typer.Argument(
            help="promptfoo's YAML, JSON or CSV; JSON lines of inspect-ai, OpenAI evals or ragas; or own JSON.",
            exists=True,
            dir_okay=False,
        ),
    ],
    *,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Template for tests without prompts, such as '{{ question }}' for a CSV."
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(help="Model that grades by rubrics, which becomes part of the set."),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with `rubric`, `input`, `output` and the `score` of a person, from 0 to 1.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    organisation: OrganisationFilterOption = None,
    store: StoreUrl = None,
) -> None:
    """Add a version of a golden set to the store. The same content again adds none. Code in files is never run."""
    golden = _read_file(file, prompt, judge, labels)
    with open_or_create_store(store) as opened_store:
        added = opened_store.quality.add_version(
            name,
            golden.encode(),
            digest=golden.digest,
            items=len(golden.items),
            judge=golden.judge,
            organisation=find_id(find_organisation, opened_store, organisation),
            actor=audit_actor(),
        )
    rubrics = (
        ""
        if golden.judge or not golden.has_rubrics
        else " Its rubrics need `--judge` for each run."
    )
    typer.echo(f"{added.reference} has {added.items} items ({added.id}).{rubrics}")


@app.command("list")
def list_sets(
    *,
    organisation: OrganisationFilterOption = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """List the versions of all golden sets."""
    with open_existing_store(store) as opened_store:
        found = opened_store.quality.list_sets(
            find_id(find_organisation, opened_store, organisation)
        )
        names = account_names(opened_store)
    print_records(
        found,
        ("Set", "Version", "Items", "Judge", "Owner", "By", "Id"),
        lambda each: (
            each.name,
            each.version,
            each.items,
            each.judge,
            format_owner(names, each.organisation, None),
            each.created_by,
            each.id,
        ),
        "There are no golden sets. Add one with `argosy quality import NAME FILE`.",
        json=json,
    )


@app.command()
def runs(
    golden_set: SetArgument,
    *,
    organisation: OrganisationFilterOption = None,
    store: StoreUrl = None,
    json: JsonOutput = False,
) -> None:
    """List the runs of a golden set that the store keeps."""
    with open_existing_store(store) as opened_store:
        found = _find_set(opened_store, golden_set, organisation)
        listed = opened_store.quality.list_runs(quality_set=found.id)
    print_records(
        listed,
        ("Model", "Against", "Verdict", "Score", "By", "Id"),
        lambda each: (
            each.model,
            each.against,
            each.verdict,
            f"{each.score:.3f}",
            each.created_by,
            each.id,
        ),
        f"{found.reference} has no runs. Run it with `argosy quality run {found.name} --model MODEL`.",
        json=json,
    )


@app.command()
def delete(
    golden_set: SetArgument,
    *,
    organisation: OrganisationFilterOption = None,
    store: StoreUrl = None,
) -> None:
    """Delete a version of a golden set with its runs. Its number is not used again."""
    with open_existing_store(store) as opened_store:
        found = _find_set(opened_store, golden_set, organisation)
        opened_store.quality.delete(found.id, actor=audit_actor())
    typer.echo(f"{found.reference} is deleted.")


@app.command()
def run(
    golden_set: SetArgument,
    *,
    model: Annotated[str, typer.Option(help="Model to grade.")],
    against: Annotated[
        str | None, typer.Option(help="Model to compare it with, on the same items.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="Model that grades by rubrics. Default: that of the set.")
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0, max=0.99, help="Loss of mean score that counts as none.")
    ] = 0.05,
    min_score: Annotated[
        float, typer.Option(min=0, max=1, help="Smallest mean score for status 0.")
    ] = 0.0,
    every_item: Annotated[
        bool, typer.Option("--every-item", help="Go on after the evidence suffices.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="File for JSON lines with answers and grades.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="File for JUnit XML.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Template for tests of a file without prompts.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Items at a time.")] = 8,
    cache: Annotated[
        bool, typer.Option(help="Reuse earlier answers of the same weights and arithmetic.")
    ] = True,
    organisation: OrganisationFilterOption = None,
    store: StoreUrl = None,
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Grade a model by a golden set, and compare it with another one.

    Status 0 means that the model is not worse, 3 that it is worse or scores less than `--min-score`, and 4 that the
    set has not enough evidence. The store keeps the result of a run of one of its sets.
    """
    from argosy.quality import describe_run

    golden, stored = _load_set(golden_set, prompt, organisation, store)
    with open_client(url, api_key) as client, fail_without_server(url):
        result = _run_set(
            client,
            golden,
            (model, against, judge or golden.judge or None),
            margin=margin,
            concurrency=concurrency,
            stops_early=not every_item,
            caches=cache,
        )
    _write_reports(result, golden_set, output, junit)
    summary = result.summary
    if stored is not None:
        with open_existing_store(store) as opened_store:
            _keep_run(opened_store, stored, summary)
    if json:
        print_json(summary)
    else:
        for line in describe_run(summary):
            typer.echo(line)
    status = _exit_status(summary, min_score)
    if status:
        raise typer.Exit(status)


def _load_set(
    reference: str, prompt: str | None, organisation: str | None, store: str | None
) -> tuple[GoldenSet, QualitySet | None]:
    """Return a set from a file, or else from the store with its record."""
    from argosy.quality import decode_set

    if Path(reference).is_file():
        return _read_file(Path(reference), prompt, None, None), None
    with open_existing_store(store) as opened_store:
        found = _find_set(opened_store, reference, organisation)
        return decode_set(opened_store.quality.read_content(found)), found


def _run_set(
    client: httpx2.Client,
    golden: GoldenSet,
    models: tuple[str, str | None, str | None],
    *,
    margin: float,
    concurrency: int,
    stops_early: bool,
    caches: bool,
) -> RunResult:
    """Run a set at a server. `models` are the graded one, the one that it is compared with, and the judge."""
    from argosy.folders import cache_folder
    from argosy.progress_bar import ProgressBar
    from argosy.quality import AnswerCache, GoldenSetRun, ModelClient, QualityRunError

    def post(body: dict[str, Any]) -> tuple[int, bytes]:
        response = client.post("/v1/chat/completions", json=body)
        return response.status_code, response.content

    async def send(body: dict[str, Any]) -> tuple[int, bytes]:
        return await asyncio.get_running_loop().run_in_executor(threads, post, body)

    cache = AnswerCache(cache_folder() / "quality") if caches else None
    candidate, *others = models
    baseline, judge = (None if each is None else ModelClient(each, send, cache) for each in others)
    try:
        with (
            ThreadPoolExecutor(2 * concurrency) as threads,
            ProgressBar(f"Running {len(golden.items)} items", len(golden.items)) as bar,
        ):
            run = GoldenSetRun(
                golden,
                ModelClient(candidate, send, cache),
                baseline,
                judge,
                margin=margin,
                concurrency=concurrency,
                stops_early=stops_early,
                on_progress=lambda done: bar.update(completed=done),
            )
            return asyncio.run(run.run())
    except QualityRunError as error:
        fail(str(error), EXIT_FAILURE)
    except ValueError as error:
        fail(str(error))
    finally:
        if cache is not None:
            cache.close()


def _write_reports(result: RunResult, name: str, output: Path | None, junit: Path | None) -> None:
    from argosy.quality import format_jsonl, format_junit

    try:
        if output is not None:
            output.write_bytes(format_jsonl(result))
        if junit is not None:
            junit.write_bytes(format_junit(result, name))
    except OSError as error:
        fail(f"cannot write {error.filename} ({error.strerror}); choose another file")


def _keep_run(store: Store, found: QualitySet, summary: RunSummary) -> None:
    from argosy.quality import describe_stored_run

    store.quality.add_run(found.id, **describe_stored_run(summary), actor=audit_actor())


def _exit_status(summary: RunSummary, min_score: float) -> int:
    from argosy.policy.quality import QualityVerdict

    verdict = None if summary.comparison is None else summary.comparison.verdict
    if verdict is QualityVerdict.WORSE or summary.score < min_score:
        return EXIT_WORSE
    return EXIT_UNDECIDED if verdict is QualityVerdict.UNDECIDED else 0


def _read_file(file: Path, prompt: str | None, judge: str | None, labels: Path | None) -> GoldenSet:
    """Read a set, and add a judge and labels to it. A file that cannot be used ends the command."""
    import msgspec

    from argosy.quality import read_golden_set, read_labels

    try:
        golden = read_golden_set(file, prompt)
        return msgspec.structs.replace(
            golden,
            judge=golden.judge if judge is None else judge,
            labels=golden.labels if labels is None else read_labels(labels),
        )
    except OSError as error:
        fail(f"cannot read {error.filename} ({error.strerror})")
    except ValueError as error:
        fail(str(error))


def _find_set(store: Store, reference: str, organisation: str | None) -> QualitySet:
    """Return the version with this id, or that of the only set with this name. Raises ValueError otherwise."""
    known = store.quality.list_sets(find_id(find_organisation, store, organisation))
    name, _, version = reference.partition("@")
    found = [
        each
        for each in known
        if each.id == reference or (each.name == name and version in {"", str(each.version)})
    ]
    if not found:
        raise ValueError(
            f"there is no file and no golden set {reference!r}; see `argosy quality list`"
        )
    if len({each.organisation for each in found}) > 1:
        raise ValueError(
            f"there is more than one golden set {name!r}; give --organisation, or an id of `argosy quality list`"
        )
    return max(found, key=lambda each: each.version)
