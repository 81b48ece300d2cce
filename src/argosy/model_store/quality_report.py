"""Quality report of a quantized model: how its predictions differ from those of the model in full precision."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.model_store.manifest import ModelDigest, ModelStoreError
from argosy.model_store.model_files import QUALITY_FILE

RecipeName = Literal["w8a8", "w4a8-g32", "w4a8-g128"]
"""Bits of weights and activations, and the weights along K that share a scale."""
RoundingMethod = Literal["rtn", "awq", "gptq"]
MAX_REPORT_BYTES = 1 << 20
Share = Annotated[float, Meta(ge=0, le=1)]
Divergence = Annotated[float, Meta(ge=-1e-3)]


class QualityLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits that a quantized model has to keep."""

    perplexity_increase: Annotated[float, Meta(ge=0)] = 0.01
    """Largest increase of the perplexity, as a share of that of the base."""
    mean_kl: Annotated[float, Meta(ge=0)] = 0.02
    """Largest mean of the Kullback-Leibler divergences, in nats."""
    same_top: Share = 0.98
    """Smallest share of the tokens with the same most likely token."""


class QualityReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Differences between a quantized model and its base on text that calibrated neither."""

    version: Literal[1] = 1
    base_digest: ModelDigest
    """Digest of the model in full precision."""
    digest: ModelDigest
    """Digest of the quantized model. The report is not a part of it."""
    arithmetic: str
    """Identity of the arithmetic with which the quantized model was measured."""
    recipe: RecipeName
    method: RoundingMethod
    calibration_tokens: Annotated[int, Meta(ge=0)]
    data_digest: str
    """SHA-256 of the measured documents."""
    tokens: Annotated[int, Meta(ge=1)]
    """Measured predictions."""
    base_perplexity: Annotated[float, Meta(ge=1)]
    perplexity: Annotated[float, Meta(ge=1)]
    mean_kl: Divergence
    """Mean divergence of the quantized model's predictions from those of the base, in nats."""
    p99_kl: Divergence
    max_kl: Divergence
    same_top: Share
    """Share of the tokens with the same most likely token."""
    same_top5: Share
    """Share of the five most likely tokens of the base that are also among those of the quantized model."""
    greedy_prompts: Annotated[int, Meta(ge=0)]
    """Prompts that both models continue with their most likely tokens."""
    greedy_tokens: Annotated[float, Meta(ge=0)]
    """Mean number of equal tokens before the first difference."""
    max_greedy_tokens: Annotated[int, Meta(ge=0)]
    """Number of tokens of each continuation."""
    kept: tuple[str, ...] = ()
    """Matrices that were not quantized, besides the head."""
    rounded_experts: tuple[str, ...] = ()
    """Experts that too few calibration tokens reached, which were rounded to the nearest."""
    limits: QualityLimits
    """Limits that were asked for."""

    @property
    def perplexity_increase(self) -> float:
        """Increase of the perplexity, as a share of that of the base."""
        return self.perplexity / self.base_perplexity - 1

    @property
    def failures(self) -> list[str]:
        """Limits that are not kept, as sentences without a full stop; empty if the model passes."""
        limits, found = self.limits, []
        if not self.perplexity_increase <= limits.perplexity_increase:
            found.append(
                f"the perplexity rises by {self.perplexity_increase:.2%} (limit {limits.perplexity_increase:.2%})"
            )
        if not self.mean_kl <= limits.mean_kl:
            found.append(f"the mean KL divergence is {self.mean_kl:.4f} (limit {limits.mean_kl:g})")
        if not self.same_top >= limits.same_top:
            found.append(
                f"{self.same_top:.2%} of the most likely tokens are the same (limit {limits.same_top:.2%})"
            )
        return found


def default_limits(recipe: RecipeName) -> QualityLimits:
    """Return the limits of a recipe. Four bits may change more of the most likely tokens."""
    return QualityLimits(same_top=0.98 if recipe == "w8a8" else 0.95)


def read_quality_report(path: Path) -> QualityReport | None:
    """Return the quality report beside a model, or None if it has none.

    Args:
        path: Directory of the model, or a GGUF file.

    Raises:
        ModelStoreError: The report is damaged.
        OSError: It cannot be read.
    """
    file = (path if path.is_dir() else path.parent) / QUALITY_FILE
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_REPORT_BYTES + 1)
    except FileNotFoundError:
        return None
    return parse_quality_report(content, str(file))


def parse_quality_report(content: bytes, origin: str) -> QualityReport:
    """Decode a report, which may come from anywhere. Error messages call it `origin`.

    Raises:
        ModelStoreError: It is no report.
    """
    try:
        if len(content) > MAX_REPORT_BYTES:
            raise ModelStoreError(f"it has more than {MAX_REPORT_BYTES >> 10} KiB")  # noqa: TRY301
        return msgspec.json.decode(content, type=QualityReport)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ModelStoreError) as error:
        raise ModelStoreError(
            f"{origin} is no quality report: {error}. Measure the model again with `argosy quantize`."
        ) from error


def find_report_problem(report: QualityReport | None, digest: str) -> str | None:
    """Return why a report does not let a model with this digest be served, or None if it does."""
    if report is None:
        return "it has no quality report (`argosy quantize` writes one)"
    if report.digest != digest:
        return f"its quality report is that of another model, {report.digest}"
    if failures := report.failures:
        return f"its quality report fails: {'; '.join(failures)}"
    return None
