"""`argosy routing`: classifiers that send simple prompts to a smaller model, made from labelled prompts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec import Meta, Raw

from argosy.cli.failure import fail
from argosy.cli.output import JsonOutput, print_json, print_records
from argosy.cli.quantities import format_count

if TYPE_CHECKING:
    from argosy.policy.traffic import PromptClassifier, PromptSample
    from argosy.policy.traffic.classifier_training import LabelledPrompt

app = typer.Typer(
    help="Classifiers that send simple prompts to a smaller model.", no_args_is_help=True
)
MAX_DATA_BYTES = 1 << 30
"""Size of the largest file with labelled prompts."""
MAX_ROWS = 1_000_000
MAX_LINE_BYTES = 1 << 20

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


class _Result(msgspec.Struct, frozen=True):
    quality: Annotated[float, Meta(ge=0, le=1)]
    cost: Annotated[float, Meta(ge=0, le=1e12)] = 1.0


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
    from argosy.protocol import ApiError

    prompts: list[LabelledPrompt] = []
    hashed = hashlib.sha256()
    decode = msgspec.json.Decoder(_Row).decode
    try:
        if path.stat().st_size > MAX_DATA_BYTES:
            fail(f"{path} has more than {MAX_DATA_BYTES} bytes. Use fewer prompts.")
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                hashed.update(line)
                if not line.strip():
                    continue
                if number > MAX_ROWS:
                    fail(f"{path} has more than {MAX_ROWS} lines. Use fewer prompts.")
                row = decode(line)
                small, large = (
                    LabelledAnswer(quality=each.quality, cost=each.cost)
                    for each in (row.small, row.large)
                )
                prompts.append(LabelledPrompt(_sample(row), row.group, small, large))
    except OSError as error:
        fail(f"cannot read {path} ({error.strerror}). Check the path.")
    except (ValueError, ApiError) as error:
        fail(f"{path}: line {number}: {error}")
    if not prompts:
        fail(f"{path} has no prompts. Add labelled prompts.")
    return prompts, f"sha256:{hashed.hexdigest()}"


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
