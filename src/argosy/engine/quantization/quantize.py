"""Quantization of a checkpoint into a new folder, with a report of its quality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from argosy.engine.execution.architectures.decoder_config import read_architecture
from argosy.engine.execution.checkpoint_formats.checkpoint import resolve_model_path
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader, read_quantization
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.loading.model_selection import select_implementation
from argosy.engine.offline_request_processor import configure_quiet_logging
from argosy.engine.quantization.calibration_text import CalibrationText, read_calibration_text
from argosy.engine.quantization.checkpoint_writer import CheckpointWriter, new_folder
from argosy.engine.quantization.model_quantizer import ModelQuantizer, QuantizationSummary
from argosy.engine.quantization.quality_measurement import (
    GREEDY_TOKENS,
    TOP_COUNT,
    compare_continuations,
    compare_predictions,
    load_for_measurement,
    perplexity,
)
from argosy.engine.quantization.weight_rounding import Recipe
from argosy.model_store import (
    QUALITY_FILE,
    QualityLimits,
    QualityReport,
    RecipeName,
    RoundingMethod,
    compute_manifest,
    list_model_files,
)

MEASURED_TOKENS = 20_000


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """Result of a quantization."""

    report: QualityReport
    summary: QuantizationSummary


def quantize_model(
    model: str,
    output: Path,
    recipe: RecipeName,
    *,
    method: RoundingMethod = "gptq",
    calibration: str = "builtin",
    calibration_tokens: int = 131_072,
    limits: QualityLimits,
    progress: Callable[[str, float], None],
) -> QuantizedModel:
    """Quantize a model on this machine's CPU, measure it, and write it to a new folder.

    The folder appears whole, with its report, whether or not the model keeps the limits.

    Args:
        model: Directory, name on the hub, name of a bundled model, or reference to the model store.
        output: Folder to create.
        recipe: Format of the weights.
        method: How they are rounded.
        calibration: File of JSON lines, or `builtin`.
        calibration_tokens: Largest number of tokens for calibration.
        limits: Limits that the report states.
        progress: Called with a phase and its finished fraction, 0 to 1.

    Raises:
        ValueError: The model or the text cannot be used, or the folder cannot be written. The message says what to do.
    """
    configure_quiet_logging()
    base = resolve_model_path(model, None)
    _check_model(base)
    with new_folder(output.expanduser().absolute()) as folder:
        text = read_calibration_text(calibration, base, calibration_tokens, MEASURED_TOKENS)
        device = create_cpu_device(None)
        architecture = read_architecture(base)
        quantizer = ModelQuantizer(
            CheckpointReader(base),
            architecture,
            device,
            Recipe.named(recipe),
            method,
            CheckpointWriter(folder),
        )
        summary = quantizer.run(
            text.calibration, folder, lambda done: progress("quantizing layers", done)
        )
        measured = _measure(base, folder, text, device, progress)
        report = QualityReport(
            recipe=recipe,
            method=method,
            calibration_tokens=sum(map(len, text.calibration)),
            kept=tuple(summary.kept),
            rounded_experts=tuple(summary.rounded_experts),
            limits=limits,
            **measured,
        )
        content = msgspec.json.format(msgspec.json.encode(report), indent=2)
        (folder / QUALITY_FILE).write_bytes(content + b"\n")
    return QuantizedModel(report, summary)


def _check_model(base: Path) -> None:
    """Check that the model is one that is quantized here.

    Raises:
        ValueError: It is not. The message says what to do.
    """
    if base.is_file():
        raise ValueError(f"{base} is a GGUF file; give the safetensors checkpoint of the model")
    stored = read_quantization(base)
    if stored is not None:
        raise ValueError(
            f"{base} is quantized already ({stored.describe()}); give the model in full precision"
        )
    if select_implementation(base, "auto").implementation != "argosy":
        raise ValueError(
            f"{base} is no family of Argosy's own decoder, whose layers alone are quantized"
        )


def _measure(
    base: Path,
    folder: Path,
    text: CalibrationText,
    device: Device,
    progress: Callable[[str, float], None],
) -> dict[str, Any]:
    """Measure the model in a folder, and return the fields of the report that depend on the two models."""
    progress("measuring predictions", 0.0)
    base_decoder, _ = load_for_measurement(base, device)
    decoder, arithmetic = load_for_measurement(folder, device)
    found = compare_predictions(base_decoder, decoder, text.measured)
    del base_decoder, decoder
    progress("measuring continuations", 0.5)
    equal = compare_continuations(base, folder, text.measured)
    divergences = torch.cat(found.divergences)
    digests = [compute_manifest(list_model_files(path)).digest for path in (base, folder)]
    progress("measuring continuations", 1.0)
    return {
        "base_digest": digests[0],
        "digest": digests[1],
        "arithmetic": arithmetic,
        "data_digest": text.digest,
        "tokens": found.tokens,
        "base_perplexity": perplexity(found.base_loss, found.tokens),
        "perplexity": perplexity(found.loss, found.tokens),
        "mean_kl": float(divergences.double().mean()),
        "p99_kl": float(divergences.double().quantile(0.99)),
        "max_kl": float(divergences.max()),
        "same_top": found.same_top / found.tokens,
        "same_top5": found.same_top5 / (TOP_COUNT * found.tokens),
        "greedy_prompts": len(equal),
        "greedy_tokens": sum(equal) / max(len(equal), 1),
        "max_greedy_tokens": GREEDY_TOKENS,
    }
