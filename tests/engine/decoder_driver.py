"""Driver of a decoder without scheduler: sequences in KV blocks, and any mixture of chunks in one forward pass."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from argosy.engine.engine_config import QuantizeSetting
from argosy.engine.execution.architectures.decoder import ModelArchitecture
from argosy.engine.execution.architectures.decoder_config import read_architecture
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader
from argosy.engine.execution.decoders.decoder import Decoder
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.kernels.pack_cache import PackCache
from argosy.engine.execution.layers.model import Model
from argosy.engine.execution.loading.weight_loader import load_decoder

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
) -> Decoder:
    """Load a checkpoint with Argosy's own decoder on one thread, by default with the architecture that it states."""
    return load_decoder(
        CheckpointReader(path),
        architecture or read_architecture(path),
        create_cpu_device(1),
        dtype,
        lambda _: None,
        quantize=quantize,
        pack_cache=pack_cache,
    )


class DecoderDriver:
    """Runs chunks of named sequences through a decoder and its KV cache, with blocks in random order."""

    def __init__(self, decoder: Model, num_blocks: int = 128) -> None:
        self._decoder = decoder
        self._windows = decoder.architecture.kv_layout.windows
        num_blocks *= len(self._windows)
        self._attention = decoder.create_attention(num_blocks, BLOCK_SIZE)
        self._free = list(range(num_blocks))
        random.Random(7).shuffle(self._free)
        self._blocks: dict[str, list[list[int]]] = {}
        """Blocks of each sequence in order. Each is a block in every KV cache group."""
        self._lengths: dict[str, int] = {}
        self._free_rows = list(range(MAX_SEQUENCES))
        self._rows: dict[str, int] = {}
        self._states = decoder.create_states(MAX_SEQUENCES, 0)

    def forward(self, chunks: Sequence[tuple[str, list[int]]]) -> list[Tensor]:
        """Append each chunk's tokens to its sequence, and return the logits [tokens, vocab] of each chunk."""
        logits = self._decoder.forward(self.batch(chunks), self._attention)
        return list(logits.split([len(tokens) for _, tokens in chunks]))

    def logits_in_one_chunk(self, tokens: list[int]) -> Tensor:
        """Return the logits of every position of a new sequence, computed in one chunk."""
        name = f"one chunk {len(self._lengths)}"
        (logits,) = self.forward([(name, tokens)])
        self.release(name)
        return logits

    def greedy(self, prompts: list[list[int]], steps: int, chunk: int = 10_000) -> list[list[int]]:
        """Generate greedily from all prompts together, with at most `chunk` prompt tokens per step."""
        names = [f"greedy {index} {len(self._lengths)}" for index in range(len(prompts))]
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

    def release(self, name: str) -> None:
        """Remove a sequence. Its blocks are reused without being cleared."""
        for blocks in self._blocks.pop(name):
            self._free.extend(blocks)
        self._free_rows.append(self._rows.pop(name))
        del self._lengths[name]
        self._lengths[f"released {name}"] = 0

    def batch(self, chunks: Sequence[tuple[str, list[int]]]) -> Batch:
        """Append the chunks to their sequences and return the batch."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[list[int]] = []
        ends = [0]
        for name, tokens in chunks:
            start = self._lengths.get(name, 0)
            blocks = self._blocks.setdefault(name, [])
            length = start + len(tokens)
            while len(blocks) * BLOCK_SIZE < length:
                blocks.append([self._free.pop() for _ in self._windows])
            ids += tokens
            positions += range(start, length)
            slots += [
                [
                    block * BLOCK_SIZE + position % BLOCK_SIZE
                    for block in blocks[position // BLOCK_SIZE]
                ]
                for position in range(start, length)
            ]
            ends.append(len(ids))
            self._lengths[name] = length
        names = [name for name, _ in chunks]
        for name in names:
            if name not in self._rows:
                self._rows[name] = self._free_rows.pop()
        width = max(len(self._blocks[name]) for name in names)
        unused = [[0] * len(self._windows)]
        tables = [self._blocks[name] + unused * (width - len(self._blocks[name])) for name in names]
        batch = Batch(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            query_start_loc=torch.tensor(ends, dtype=torch.int32),
            seq_lens=torch.tensor([self._lengths[name] for name in names], dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32).permute(2, 0, 1).contiguous(),
            slot_mappings=torch.tensor(slots).T.contiguous(),
            rows=torch.tensor([self._rows[name] for name in names]),
            logit_index=torch.arange(len(ids)),
        )
        return batch if self._states is None else self._states.attach(batch)
