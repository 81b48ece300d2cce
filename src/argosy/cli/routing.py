"""`argosy routing`: classifiers that send simple prompts to a smaller model, made from labelled prompts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer
from msgspec import Meta, Raw

from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.output import JsonOutput, print_json, print_records
from argosy.cli.quantities import format_count
from argosy.cli.server_client import (
    DEFAULT_URL,
    GatewayApiKey,
    GatewayUrl,
    ServerApiKey,
    ServerUrl,
    error_message,
    fail_without_server,
    open_client,
)

if TYPE_CHECKING:
    import httpx2

    from argosy.policy.traffic import PromptClassifier, PromptSample
    from argosy.policy.traffic.classifier_training import LabelledPrompt

app = typer.Typer(
    help="Classifiers that send simple prompts to a smaller model.", no_args_is_help=True
)
T = TypeVar("T")
MAX_DATA_BYTES = 1 << 30
"""Size of the largest file with labelled prompts."""
MAX_ROWS = 1_000_000
MAX_LINE_BYTES = 1 << 20
_DECISIONS = ("simple", "not_simple", "escalated", "degraded")
_DECISION = re.compile(
    r"^argosy_gateway_route_decisions_total\{([^}]*)\} ([0-9.e+]+)$", re.MULTILINE
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

DataOption = Annotated[
    Path,
    typer.Option(
        help="JSON lines with `messages` or `prompt`, `small` and `large` with `quality` from 0 to 1 and `cost`, and "
        "optionally `group`, such as the template of the prompt."
    ),
]
QualityOption = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Wanted quality, relative to the large model alone."),
]


class _Prompt(msgspec.Struct, frozen=True):
    """A line of the prompts that are labelled. Other keys are ignored."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    expected: str | None = None
    group: Annotated[str, Meta(max_length=2000)] = ""


class _Result(msgspec.Struct, frozen=True):
    quality: Annotated[float, Meta(ge=0, le=1)]
    cost: Annotated[float, Meta(ge=0, le=1e12)] = 1.0


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message


class _Usage(msgspec.Struct, frozen=True):
    total_tokens: int


class _ChatAnswer(msgspec.Struct, frozen=True):
    """Parts of a chat completion that are read."""

    choices: list[_Choice]
    usage: _Usage


class _Row(msgspec.Struct, frozen=True):
    """A line of the data. Other keys are ignored."""

    small: _Result
    large: _Result
    messages: Raw = Raw()
    prompt: str | None = None
    group: Annotated[str, Meta(max_length=2000)] = ""


@app.command()
def train(
    *,
    data: DataOption,
    small: Annotated[
        str, typer.Option(help="Small model: a folder, store:NAME, sha256:DIGEST or argosy-mini.")
    ],
    large: Annotated[str, typer.Option(help="Large model, likewise.")],
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("classifier.json"),
    json: JsonOutput = False,
) -> None:
    """Train a classifier on one half of labelled prompts, and measure it on the other half."""
    from argosy.policy.traffic.classifier_training import train_classifier

    prompts, digest = _read_data(data)
    try:
        classifier = train_classifier(
            prompts,
            small=(small, _find_digest(small)),
            large=(large, _find_digest(large)),
            data_digest=digest,
        )
        output.write_bytes(msgspec.json.format(msgspec.json.encode(classifier)) + b"\n")
    except ValueError as error:
        fail(f"{data}: {error}")
    except OSError as error:
        fail(f"cannot write {output} ({error.strerror}). Choose another --output.")
    if json:
        print_json(classifier.card)
        return
    typer.echo(_describe(classifier))
    typer.echo(f"Wrote {output}. Name it as `classifier.file` of a route.")


@app.command()
def label(
    prompts: Annotated[
        Path,
        typer.Argument(
            help="JSON lines with `messages` or `prompt`, and optionally `group` and `expected`, a text that right "
            "answers contain."
        ),
    ],
    *,
    small: Annotated[str, typer.Option(help="Name of the small model at the server.")],
    large: Annotated[str, typer.Option(help="Name of the large model.")],
    cost_ratio: Annotated[
        float,
        typer.Option(min=1.0, help="Cost of a token of the large model, 1 being the small's."),
    ],
    judge: Annotated[
        str | None,
        typer.Option(help="Model that grades the answers to prompts without an expected one."),
    ] = None,
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("labelled.jsonl"),
    max_tokens: Annotated[int, typer.Option(min=1, max=32_768, help="Of an answer.")] = 512,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Prompts at a time.")] = 4,
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerApiKey = None,
) -> None:
    """Label prompts, for example a sample of live ones: both models of a server answer, and a judge grades."""
    decode = msgspec.json.Decoder(_Prompt).decode
    rows = list(_read_lines(prompts, decode))
    missing = [number for number, row in rows if row.expected is None]
    if judge is None and missing:
        fail(f"{prompts}: line {missing[0]} has no `expected`. Add it, or name a --judge.")
    with open_client(url, api_key) as client, fail_without_server(url):

        def label_row(numbered: tuple[int, _Prompt]) -> bytes:
            _, row = numbered
            messages = row.messages or [{"role": "user", "content": row.prompt or ""}]
            results = {}
            for size, model, price in (("small", small, 1.0), ("large", large, cost_ratio)):
                answer, tokens = _ask(client, model, messages, max_tokens)
                if row.expected is not None:
                    quality = float(row.expected.casefold() in answer.casefold())
                else:
                    quality = _grade(client, judge or "", messages, answer)
                results[size] = {"quality": quality, "cost": tokens * price}
            return msgspec.json.encode({"messages": messages, "group": row.group, **results})

        try:
            with output.open("wb") as file, ThreadPoolExecutor(concurrency) as pool:
                for line in pool.map(label_row, rows):
                    file.write(line + b"\n")
        except OSError as error:
            fail(f"cannot write {output} ({error.strerror}). Choose another --output.")
        except _LabelError as error:
            fail(str(error), EXIT_FAILURE)
    typer.echo(f"Labelled {format_count(len(rows))} prompts in {output}.")


@app.command()
def decisions(
    *,
    url: GatewayUrl,
    api_key: GatewayApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Show how often each route of a gateway decided what, live and in dry runs, since it started."""
    with open_client(url, api_key) as client, fail_without_server(url):
        response = client.get("/metrics")
        if response.status_code != HTTPStatus.OK:
            fail(error_message(response.content), EXIT_FAILURE)
    counts: dict[tuple[str, bool], dict[str, int]] = {}
    for labels, value in _DECISION.findall(response.text):
        found = dict(_LABEL.findall(labels))
        row = counts.setdefault((found["route"], found["dry_run"] == "true"), {})
        row[found["decision"]] = int(float(value))
    rows = [
        {"route": route, "dry_run": is_dry_run, **{name: each.get(name, 0) for name in _DECISIONS}}
        for (route, is_dry_run), each in sorted(counts.items())
    ]
    print_records(
        rows,
        ("Route", "Dry run", "Simple", "Not simple", "Escalated", "Degraded"),
        lambda row: tuple(row.values()),
        "No route has decided about a prompt, load or a budget yet.",
        json=json,
    )


@app.command()
def report(
    classifier: Annotated[Path, typer.Argument(help="File of a classifier.")],
    *,
    data: DataOption,
    quality: QualityOption = 0.95,
    json: JsonOutput = False,
) -> None:
    """Report cost saved and quality lost on labelled prompts, beside a random choice, the length, and an oracle."""
    from argosy.deployment import read_classifier
    from argosy.policy.traffic import ClassifierTarget
    from argosy.policy.traffic.classifier_training import (
        LabelledSet,
        compare_routers,
        measure_target,
    )

    prompts, digest = _read_data(data)
    labelled = LabelledSet(prompts)
    try:
        trained = read_classifier(classifier, "classifier")
        result = measure_target(trained, labelled, ClassifierTarget(quality_share=quality))
        routers = compare_routers(trained, labelled, quality)
    except ValueError as error:
        fail(str(error))
    small, large = (float(each[:, 0].mean()) for each in (labelled.small, labelled.large))
    if json:
        print_json(
            {
                "prompts": len(labelled),
                "small_quality": small,
                "large_quality": large,
                "is_training_data": digest == trained.card.data_digest,
                "target": result,
                "routers": routers,
            }
        )
        return
    typer.echo(
        f"{len(labelled)} prompts. Mean quality: {small:.3f} of the small model, {large:.3f} of the large one."
    )
    if digest == trained.card.data_digest:
        typer.echo("These are the prompts of its training. See the model card for those held out.")
    typer.echo(
        f"Threshold for {quality:.0%} of the quality, chosen in training: "
        f"{_format_interval(result.quality_share)} of the quality, {_format_interval(result.saving)} saved, "
        f"{result.traffic_share:.0%} to the large model."
    )
    print_records(
        routers,
        ("Router", f"Saved at {quality:.0%}", "AUC"),
        lambda each: (each.router, f"{each.saving:.1%}", f"{each.auc:.2f}"),
        "",
        json=False,
    )


class _LabelError(Exception):
    """A prompt cannot be labelled."""


def _ask(
    client: httpx2.Client, model: str, messages: Sequence[Mapping[str, Any]], max_tokens: int
) -> tuple[str, int]:
    """Return a model's greedy answer, and the tokens of prompt and answer. Raises _LabelError."""
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    response = client.post("/v1/chat/completions", json=body)
    if response.status_code != HTTPStatus.OK:
        raise _LabelError(f"{model}: {error_message(response.content)}")
    answering = response.headers.get("x-argosy-model", model)
    if answering != model:
        raise _LabelError(
            f"{answering} answers for {model} by a route. Set its dry_run, or label at another gateway."
        )
    try:
        answer = msgspec.json.decode(response.content, type=_ChatAnswer)
    except msgspec.DecodeError as error:
        raise _LabelError(f"{model}: the response is no chat completion ({error})") from error
    text = answer.choices[0].message.content if answer.choices else None
    return text or "", answer.usage.total_tokens


def _grade(
    client: httpx2.Client, judge: str, messages: Sequence[Mapping[str, Any]], answer: str
) -> float:
    """Return a judge's grade of an answer, from 0 to 1. Raises _LabelError."""
    from argosy.policy.traffic import JUDGE_TOKENS, build_judge_prompt, parse_grade

    asked = "\n\n".join(
        str(message["content"]) for message in messages if message.get("role") == "user"
    )
    prompt = build_judge_prompt(asked, answer)
    text, _ = _ask(client, judge, [{"role": "user", "content": prompt}], JUDGE_TOKENS)
    grade = parse_grade(text)
    if grade is None:
        raise _LabelError(f"{judge} answered {text[:80]!r} and no grade. Choose another --judge.")
    return grade


def _describe(classifier: PromptClassifier) -> str:
    card = classifier.card
    lines = [
        f"Trained on {format_count(card.training_rows)} prompts.",
        f"Held out: {format_count(card.held_out_rows)} prompts by {card.held_out_by}, AUC {card.auc:.2f}.",
        *(
            f"Mean quality of {each.name}: {each.quality:.3f}"
            for each in (classifier.small, classifier.large)
        ),
    ]
    lines += [
        f"For {each.target:.0%} of the quality: {_format_interval(each.quality_share)} reached, "
        f"{_format_interval(each.saving)} saved, {each.traffic_share:.0%} to the large model."
        for each in card.held_out
    ]
    return "\n".join(lines)


def _format_interval(values: tuple[float, float, float]) -> str:
    low, value, high = values
    return f"{value:.1%} ({low:.1%} to {high:.1%})"


def _read_data(path: Path) -> tuple[list[LabelledPrompt], str]:
    """Return the labelled prompts of a file, and its digest. Fails with what to change."""
    from argosy.policy.traffic.classifier_training import LabelledAnswer, LabelledPrompt

    def parse(line: bytes) -> LabelledPrompt:
        row = decode(line)
        small, large = (
            LabelledAnswer(quality=each.quality, cost=each.cost) for each in (row.small, row.large)
        )
        return LabelledPrompt(_sample(row), row.group, small, large)

    decode = msgspec.json.Decoder(_Row).decode
    hashed = hashlib.sha256()
    prompts = [prompt for _, prompt in _read_lines(path, parse, hashed.update)]
    return prompts, f"sha256:{hashed.hexdigest()}"


def _read_lines(
    path: Path, parse: Callable[[bytes], T], on_line: Callable[[bytes], object] = len
) -> Iterator[tuple[int, T]]:
    """Yield the numbers and the contents of the lines of a file that are not blank. Fails with what to change."""
    from argosy.protocol import ApiError

    number, is_empty = 0, True
    try:
        if path.stat().st_size > MAX_DATA_BYTES:
            fail(f"{path} has more than {MAX_DATA_BYTES} bytes. Use fewer prompts.")
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                on_line(line)
                if number > MAX_ROWS:
                    fail(f"{path} has more than {MAX_ROWS} lines. Use fewer prompts.")
                if line.strip():
                    yield number, parse(line)
                    is_empty = False
    except OSError as error:
        fail(f"cannot read {path} ({error.strerror}). Check the path.")
    except (ValueError, ApiError) as error:
        fail(f"{path}: line {number}: {error}")
    if is_empty:
        fail(f"{path} has no prompts. Add some.")


def _sample(row: _Row) -> PromptSample:
    """Return what a classifier reads of a prompt. Raises ValueError or ApiError if it has no text."""
    from argosy.gateway import sample_body

    body = {"messages": row.messages} if bytes(row.messages) else {"prompt": row.prompt}
    sample = sample_body(msgspec.json.encode(body))
    if sample is None:
        raise ValueError("give `prompt` as a text, or `messages` with one of the user")
    return sample


def _find_digest(model: str) -> str:
    """Return the digest of a model. Fails if there is none."""
    from argosy.model_store import (
        DIGEST_PREFIX,
        ModelStoreError,
        compute_manifest,
        list_model_files,
        open_model_store,
    )
    from argosy.models import BUNDLED_MODELS

    if model.startswith(DIGEST_PREFIX):
        return model
    try:
        folder = BUNDLED_MODELS.get(model) or Path(model).expanduser()
        if folder.exists():
            return compute_manifest(list_model_files(folder)).digest
        return open_model_store().find(model).digest
    except (ModelStoreError, OSError) as error:
        fail(f"{model}: {error}")
