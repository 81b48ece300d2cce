"""Driver of a decoder without scheduler: sequences in KV blocks, and any mixture of chunks in one forward pass."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from argosy.engine.engine_config import QuantizeSetting
from argosy.engine.execution.adapters import AdapterTable
from argosy.engine.execution.architectures.decoder import ModelArchitecture
from argosy.engine.execution.architectures.decoder_config import read_architecture
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader
from argosy.engine.execution.decoders.decoder import Decoder
from argosy.engine.execution.executor.persistent_batch import PersistentBatch
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.pack_cache import PackCache
from argosy.engine.execution.layers.model import Model
from argosy.engine.execution.loading.weight_loader import load_decoder
from argosy.engine.scheduling import AdmittedSequence, StepPlan
from argosy.protocol import SamplingParams
from tests.engine.transformers_reference import Reference

BLOCK_SIZE = 16
MAX_SEQUENCES = 256
"""Maximum number of sequences that are not released."""


def load_checkpoint(
    path: Path,
    dtype: torch.dtype = torch.float32,
    *,
    architecture: ModelArchitecture | None = None,
    quantize: QuantizeSetting | None = None,
    pack_cache: PackCache | None = None,
    device: Device | None = None,
) -> Decoder:
    """Load a checkpoint with Argosy's own decoder, by default for one CPU and with the architecture that it states."""
    device = device or create_cpu_device(1)
    return load_decoder(
        CheckpointReader(path, computes_float8=device.computes_float8),
        architecture or read_architecture(path),
        device,
        dtype,
        lambda _: None,
        quantize=quantize,
        pack_cache=pack_cache,
    )


class DecoderDriver:
    """Runs chunks of named sequences through a decoder and its KV cache, with blocks in random order."""

    def __init__(self, decoder: Model, num_blocks: int = 128) -> None:
        self._decoder = decoder
        self.adapters = AdapterTable(create_cpu_device(1), MAX_SEQUENCES)
        self.adapters.model = decoder
        self.slots: dict[str, int] = {}
        """Name of a sequence -> slot of its adapter."""
        self._windows = decoder.architecture.kv_layout.windows
        num_blocks *= len(self._windows)
        self._attention = decoder.create_attention(num_blocks, BLOCK_SIZE)
        self._free = list(range(num_blocks))
        random.Random(7).shuffle(self._free)
        self._tables: dict[str, list[list[int]]] = {}
        """Blocks of each sequence in each KV cache group."""
        self._tokens: dict[str, list[int]] = {}
        self._num_names = 0
        self._free_rows = list(range(MAX_SEQUENCES))
        self._rows: dict[str, int] = {}
        self._states = decoder.create_states(MAX_SEQUENCES, 0)
        max_len = decoder.architecture.max_model_len
        num_groups = len(self._windows)
        device = torch.device("cpu")
        self._batch = PersistentBatch(MAX_SEQUENCES, max_len, BLOCK_SIZE, num_groups, device)

    def forward(self, chunks: Sequence[tuple[str, list[int]]]) -> list[Tensor]:
        """Append each chunk's tokens to its sequence, and return the logits [tokens, vocab] of each chunk."""
        logits = self._decoder.forward(self.batch(chunks), self._attention)
        return list(logits.split([len(tokens) for _, tokens in chunks]))

    def logits_in_one_chunk(self, tokens: list[int]) -> Tensor:
        """Return the logits of every position of a new sequence, computed in one chunk."""
        name = self._new_name()
        (logits,) = self.forward([(name, tokens)])
        self.release(name)
        return logits

    def greedy(self, prompts: list[list[int]], steps: int, chunk: int = 10_000) -> list[list[int]]:
        """Generate greedily from all prompts together, with at most `chunk` prompt tokens per step."""
        names = [self._new_name() for _ in prompts]
        pending = {name: list(prompt) for name, prompt in zip(names, prompts, strict=True)}
        outputs: dict[str, list[int]] = {name: [] for name in names}
        while pending:
            chunks = [(name, tokens[:chunk]) for name, tokens in pending.items()]
            for (name, tokens), logits in zip(chunks, self.forward(chunks), strict=True):
                rest = pending[name][len(tokens) :]
                if not rest:
                    outputs[name].append(int(logits[-1].argmax()))
                    rest = outputs[name][-1:]
                pending[name] = rest
                if len(outputs[name]) == steps:
                    del pending[name]
        for name in names:
            self.release(name)
        return [outputs[name] for name in names]

    def _new_name(self) -> str:
        self._num_names += 1
        return f"sequence {self._num_names}"

    def release(self, name: str) -> None:
        """Remove a sequence. Its blocks are reused without being cleared."""
        for blocks in self._tables.pop(name):
            self._free.extend(blocks)
        self._free_rows.append(self._rows.pop(name))
        del self._tokens[name]

    def batch(self, chunks: Sequence[tuple[str, list[int]]]) -> Batch:
        """Append the chunks to their sequences and return the batch."""
        plan = StepPlan(0, sample_counts=[0] * len(chunks))
        for name, new_tokens in chunks:
            if name not in self._rows:
                self._rows[name] = self._free_rows.pop()
            tokens = self._tokens.setdefault(name, [])
            plan.rows.append(self._rows[name])
            plan.starts.append(len(tokens))
            plan.counts.append(len(new_tokens))
            tokens += new_tokens
            tables = self._tables.setdefault(name, [[] for _ in self._windows])
            while len(tables[0]) * BLOCK_SIZE < len(tokens):
                for table in tables:
                    table.append(self._free.pop())
            admission = AdmittedSequence(
                self._rows[name],
                tokens,
                len(tokens),
                SamplingParams(),
                tables,
                adapter_slot=self.slots.get(name, 0),
            )
            self._batch.admit(admission)
            self.adapters.admit(admission)
        packed = self._batch.pack_step(plan, np.arange(plan.total_tokens))
        batch, _ = self._batch.gather_batch(packed.buffer, packed.shape)
        batch = self.adapters.attach(batch, plan, packed.logit_index)
        return batch if self._states is None else self._states.attach(batch)


def assert_stored_integers_match(
    path: Path, reference: Reference, prompts: list[list[int]], native_error: float
) -> None:
    """Compare a quantized checkpoint with the model of its dequantized weights.

    Dequantized, logits and tokens are equal. Natively, the error is small, and no batch or chunk changes a bit.
    """
    exact = DecoderDriver(load_checkpoint(path, quantize="none"))
    assert all(map(reference.continues, prompts, exact.greedy(prompts, 8)))
    native = DecoderDriver(load_checkpoint(path))
    alone = [native.logits_in_one_chunk(prompt) for prompt in prompts]
    for prompt, logits in zip(prompts, alone, strict=True):
        expected = reference.logits(prompt)
        torch.testing.assert_close(
            exact.logits_in_one_chunk(prompt), expected, rtol=1e-4, atol=2e-4
        )
        assert (logits - expected).square().mean().sqrt() < native_error * expected.std()
    together = native.forward([(f"t{i}", prompt) for i, prompt in enumerate(prompts)])
    assert all(map(torch.equal, together, alone))
    native.forward([("a", prompts[-1][:9])])
    chunks = native.forward([("b", prompts[0]), ("a", prompts[-1][9:])])
    assert torch.equal(chunks[1], alone[-1][9:])
