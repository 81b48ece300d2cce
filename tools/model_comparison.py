"""Comparison of a loaded decoder with transformers, and of its own results alone, batched and in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tests.engine.transformers_reference import VOCAB

from argosy.engine.execution.architectures.decoder_config import read_architecture
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader
from argosy.engine.execution.decoders.generic_loader import load_generic_decoder
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.loading.model_selection import build_transformers_model
from argosy.engine.execution.loading.weight_loader import load_decoder

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.decoder_driver import DecoderDriver
    from tests.engine.transformers_reference import Reference

    from argosy.engine.engine_config import QuantizeSetting
    from argosy.engine.execution.decoders.decoder import Decoder
    from argosy.engine.execution.decoders.generic_decoder import GenericDecoder

LENGTHS = (1, 2, 17, 33, 70)
GREEDY_TOKENS = 16
MAX_DIFFERENCE = 1e-4
"""Largest accepted difference of a log-probability."""


@dataclass(frozen=True)
class Comparison:
    """Results of a decoder beside those of transformers."""

    is_greedy_equal: bool
    max_difference: float
    """Largest difference of a log-probability."""
    relative_error: float
    """Root mean square error of the logits, relative to their standard deviation, of the worst prompt."""
    is_exact: bool
    """Whether logits are equal bit for bit alone, in a batch and in chunks."""


def compare_with_reference(
    reference: Reference, driver: DecoderDriver, min_length: int = 1
) -> Comparison:
    """Compare on random prompts of at least `min_length` tokens."""
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        for length in LENGTHS
        if length >= min_length
    ]
    alone = [driver.logits_in_one_chunk(prompt) for prompt in prompts]
    expected = [reference.logits(prompt) for prompt in prompts]
    differences = [
        float((logits.log_softmax(-1) - other.log_softmax(-1)).abs().max())
        for logits, other in zip(alone, expected, strict=True)
    ]
    errors = [
        float((logits - other).square().mean().sqrt() / other.std())
        for logits, other in zip(alone, expected, strict=True)
    ]
    together = driver.forward([(f"t{i}", prompt) for i, prompt in enumerate(prompts)])
    longest = prompts[-1]
    chunks = [longest[:1], longest[1:9], longest[9:41], longest[41:]]
    parts = [driver.forward([("n", [7]), ("c", chunk)])[1] for chunk in chunks]
    some_prompts = prompts[1:4]
    outputs = driver.greedy(some_prompts, GREEDY_TOKENS)
    return Comparison(
        is_greedy_equal=all(map(reference.continues, some_prompts, outputs)),
        max_difference=max(differences),
        relative_error=max(errors),
        is_exact=all(map(torch.equal, alone, together))
        and torch.equal(torch.cat(parts), alone[-1]),
    )


def load_own(path: Path, quantize: QuantizeSetting | None = None) -> Decoder:
    """Load a checkpoint into Argosy's own decoder, in float32."""
    return load_decoder(
        CheckpointReader(path),
        read_architecture(path),
        create_cpu_device(1),
        torch.float32,
        lambda _: None,
        quantize=quantize,
    )


def load_with_transformers(path: Path) -> GenericDecoder:
    """Load a checkpoint into the implementation of transformers, in float32."""
    model = build_transformers_model(path, torch.float32)
    return load_generic_decoder(model, create_cpu_device(1), torch.float32, lambda _: None)


def yes_or_no(value: bool) -> str:  # noqa: FBT001 - a cell
    """Return the cell of a condition that should hold."""
    return "yes" if value else "**no**"
