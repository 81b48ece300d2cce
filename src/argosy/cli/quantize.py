"""`argosy quantize`: a checkpoint with weights of 8 or 4 bits, and a report of its quality."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from argosy.cli.failure import fail
from argosy.cli.output import JsonOutput
from argosy.cli.quantities import format_count
from argosy.model_store import (
    QualityLimits,
    QualityReport,
    RecipeName,
    RoundingMethod,
    default_limits,
)

EXIT_QUALITY = 3
"""Exit status if the quantized model does not keep its limits."""
_LIMITS = {
    "perplexity": ("perplexity_increase", 0.01),
    "kl": ("mean_kl", 1.0),
    "same-top": ("same_top", 0.01),
}
"""Field and unit of each limit."""


def quantize(
    model: Annotated[
        str, typer.Argument(help="Directory, name on the hub, argosy-mini or store:NAME.")
    ],
    *,
    output: Annotated[Path, typer.Option(help="Folder to create.")],
    recipe: Annotated[
        RecipeName,
        typer.Option(help="Weights of 8 bits, or of 4 bits with a scale for 32 or 128 of them."),
    ],
    method: Annotated[
        RoundingMethod,
        typer.Option(help="Rounding: to the nearest, with AWQ's scales, or with GPTQ's feedback."),
    ] = "gptq",
    calibration: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="JSON lines with `text` or `messages`. `builtin` is text for argosy-mini.",
        ),
    ] = "builtin",
    tokens: Annotated[
        int, typer.Option(min=256, help="Largest number of tokens for calibration.")
    ] = 131_072,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Limit of the report: `perplexity=1` (increase in %), `kl=0.02` (mean, in nats), or `same-top=95` "
            "(most likely tokens that stay the same, in %). Repeatable.",
        ),
    ] = None,
    json: JsonOutput = False,
) -> None:
    """Quantize a model on the CPU, and measure it against the original. Exits with 3 if it does not keep a limit."""
    limits = _parse_limits(recipe, gate or [])
    from argosy.engine import quantize_model

    try:
        result = quantize_model(
            model,
            output,
            recipe,
            method=method,
            calibration=calibration,
            calibration_tokens=tokens,
            limits=limits,
            progress=_show_progress,
        )
    except ValueError as error:
        fail(str(error))
    if json:
        typer.echo(json_module.dumps(msgspec.to_builtins(result.report)))
    else:
        _print_report(result.report, output)
    if failures := result.report.failures:
        fail(f"{output} does not keep its limits: {'; '.join(failures)}", EXIT_QUALITY)


def _parse_limits(recipe: RecipeName, texts: list[str]) -> QualityLimits:
    limits = msgspec.to_builtins(default_limits(recipe))
    for text in texts:
        name, _, value = text.partition("=")
        if name not in _LIMITS:
            fail(f"--gate {text}: there is no limit {name!r}; use {', '.join(_LIMITS)}")
        field, unit = _LIMITS[name]
        try:
            limits[field] = float(value) * unit
        except ValueError:
            fail(f"--gate {text}: {value!r} is no number")
    try:
        return msgspec.convert(limits, QualityLimits)
    except msgspec.ValidationError as error:
        fail(f"--gate: {error}")


def _show_progress(phase: str, done: float) -> None:
    typer.echo(f"{phase}: {done:.0%}", err=True)


def _print_report(report: QualityReport, output: Path) -> None:
    rows = [
        ("model", f"{output} ({report.digest[:19]}, {report.recipe} by {report.method})"),
        ("calibrated with", f"{format_count(report.calibration_tokens)} tokens"),
        ("measured on", f"{format_count(report.tokens)} other tokens"),
        (
            "perplexity",
            f"{report.perplexity:.4f}, {report.perplexity_increase:+.2%} of {report.base_perplexity:.4f}",
        ),
        (
            "KL divergence",
            f"mean {report.mean_kl:.5f}, 99 % below {report.p99_kl:.4f}, at most {report.max_kl:.3f}",
        ),
        (
            "same most likely token",
            f"{report.same_top:.2%}, of the top five {report.same_top5:.2%}",
        ),
        (
            "equal greedy tokens",
            f"{report.greedy_tokens:.1f} of {report.max_greedy_tokens} in {report.greedy_prompts} answers",
        ),
    ]
    if report.kept:
        rows.append(("not quantized", ", ".join(report.kept)))
    if report.rounded_experts:
        rows.append(("experts without calibration", str(len(report.rounded_experts))))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:{width}}  {value}")
