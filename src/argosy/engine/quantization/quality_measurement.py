"""Measurement of a quantized model against its base, on the same documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from argosy.engine.engine_config import EngineConfig
from argosy.engine.execution.architectures.decoder_config import read_architecture
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader
from argosy.engine.execution.decoders.decoder import Decoder
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.loading.arithmetic import describe_arithmetic
from argosy.engine.execution.loading.weight_loader import load_decoder
from argosy.engine.llm import LLM
from argosy.engine.quantization.token_batches import BLOCK_SIZE, DocumentBatches
from argosy.protocol import SamplingParams

MAX_WINDOW_TOKENS = 512
"""Tokens into which measured documents are divided. It bounds the memory of the logits."""
COMPARED_ROWS = 64
"""Rows of logits that are compared at a time."""
TOP_COUNT = 5
GREEDY_PROMPTS = 64
GREEDY_PROMPT_TOKENS = 32
GREEDY_TOKENS = 128
KV_BYTES = 256 << 20
"""KV cache for the continuations."""


@dataclass(slots=True)
class Comparison:
    """Sums over the predictions of two models."""

    tokens: int = 0
    base_loss: float = 0.0
    """Sum of the negative log-probabilities of the tokens that follow, in nats."""
    loss: float = 0.0
    same_top: int = 0
    same_top5: int = 0
    divergences: list[Tensor] = field(default_factory=list)
    """Divergences of the predictions, in nats, [T] each."""

    def add(self, base: Tensor, quantized: Tensor, following: Tensor) -> None:
        """Add the logits [T, V] of both models and the tokens that follow, [T]."""
        first, second = base.float().log_softmax(-1), quantized.float().log_softmax(-1)
        self.tokens += len(following)
        index = following.unsqueeze(1)
        self.base_loss -= float(first.gather(1, index).double().sum())
        self.loss -= float(second.gather(1, index).double().sum())
        top, other = (logits.topk(TOP_COUNT, -1).indices for logits in (first, second))
        self.same_top += int((top[:, 0] == other[:, 0]).sum())
        self.same_top5 += int((top.unsqueeze(2) == other.unsqueeze(1)).sum())
        self.divergences.append((first.exp() * (first - second)).sum(-1))


def load_for_measurement(path: Path, device: Device) -> tuple[Decoder, str]:
    """Load a model in bfloat16, with its own integers if it has any, and return it with the id of its arithmetic.

    Raises:
        ValueError: The checkpoint cannot be loaded.
    """
    checkpoint, architecture = CheckpointReader(path), read_architecture(path)
    decoder = load_decoder(checkpoint, architecture, device, torch.bfloat16, lambda _: None)
    stored = checkpoint.find_stored_integers()
    arithmetic = describe_arithmetic(
        path,
        architecture,
        device,
        torch.bfloat16,
        torch.bfloat16,
        None,
        attention=decoder.create_attention(1, BLOCK_SIZE).name,
        stored_format=None if stored is None else stored.description,
    )
    return decoder, arithmetic.id


def compare_predictions(
    base: Decoder, quantized: Decoder, documents: Sequence[Sequence[int]]
) -> Comparison:
    """Compare the predictions of every token of the documents, except the first of each window."""
    windows = [
        document[start : start + MAX_WINDOW_TOKENS]
        for document in documents
        for start in range(0, len(document) - 1, MAX_WINDOW_TOKENS)
    ]
    comparison = Comparison()
    base_batches = DocumentBatches(windows, base, MAX_WINDOW_TOKENS)
    batches = DocumentBatches(windows, quantized, MAX_WINDOW_TOKENS)
    for (_, batch), (_, same) in zip(base_batches, batches, strict=True):
        expected = base.forward(batch, base_batches.attention)
        actual = quantized.forward(same, batches.attention)
        starts = batch.query_start_loc[:-1].long()
        is_start = torch.zeros(len(expected), dtype=torch.bool).index_fill_(0, starts, 1)
        rows = (~is_start).nonzero().flatten()
        for part in rows.split(COMPARED_ROWS):
            comparison.add(expected[part - 1], actual[part - 1], batch.token_ids[part])
    return comparison


def compare_continuations(
    base: Path, quantized: Path, documents: Sequence[Sequence[int]]
) -> list[int]:
    """Return for each of the first documents how many of the most likely next tokens are equal in both models."""
    prompts = [list(each[:GREEDY_PROMPT_TOKENS]) for each in documents[:GREEDY_PROMPTS]]
    params = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = []
    for path in (base, quantized):
        config = EngineConfig(
            model=str(path),
            dtype="bfloat16",
            device="cpu",
            max_model_len=GREEDY_PROMPT_TOKENS + GREEDY_TOKENS,
            kv_memory_bytes=KV_BYTES,
        )
        with LLM(config, progress="off") as llm:
            generated = llm.generate(list(prompts), params, use_tqdm=False)
        outputs.append([output.outputs[0].token_ids for output in generated])
    return [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
        for x, y in zip(*outputs, strict=True)
    ]


def perplexity(loss: float, tokens: int) -> float:
    """Return the perplexity for a sum of negative log-probabilities."""
    return math.exp(min(loss / tokens, 700.0))
