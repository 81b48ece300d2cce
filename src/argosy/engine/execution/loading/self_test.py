"""Test at start that a sequence's results depend on nothing but the sequence, bit for bit.

A few sequences are computed alone, together, in chunks and after a prefix that is in the KV cache already. All ways
must give the same logits. A model that fails is served, but marked, because its streams cannot be resumed exactly. The
last tokens of a sequence are also computed as drafts, and again one by one. If they differ, there are no drafts.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from argosy.engine.engine_config import DEFAULT_BLOCK_SIZE
from argosy.engine.execution.executor.persistent_batch import PersistentBatch
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.layers.model import Model
from argosy.engine.scheduling import AdmittedSequence, StepPlan
from argosy.folders import cache_folder, replace_file
from argosy.protocol import SamplingParams

SEQUENCE_LENGTHS = (1, 5, 35, 55)
NUM_SHORT_SEQUENCES = 20
"""Sequences of one token that are computed together with the others, so that large batches take other code paths."""
CHUNK_ENDS = (1, 4, 17, 20, 34, 52, 53, 54)
"""Positions at which sequences are cut into chunks."""
NUM_WATCHED = 3
"""Number of last positions of each sequence whose logits are compared."""
DRAFT_COUNTS = (1, 4, 15)
"""Numbers of drafts that are computed after a token."""
MAX_MEDIAN_DIFFERENCE = 0.5
"""Median difference of log-probabilities above which a model is wrong, not only inexact."""
MAX_BLOCK_SIZE = 64
"""Size of a KV block above which a divisor of it is tested, for the memory of the test's KV cache."""
MAX_STORED_RESULTS = 256

Chunk = tuple[str, int, int]
"""Name of a sequence, and the first position and the end of the chunk."""


class SelfTestResult(msgspec.Struct, frozen=True):
    """Result of a self-test."""

    is_exact: bool
    """Whether all logits were equal bit for bit."""
    failed_cases: list[str]
    """Cases whose logits differ from those of a sequence alone."""
    failed_draft_cases: list[str]
    """Cases in which logits after drafts differ from those of single tokens."""
    median_difference: float
    """Median difference of log-probabilities in the worst case of `failed_cases`. 0 if the model is exact."""


def run_self_test(
    decoder: Model,
    device: Device,
    *,
    max_model_len: int,
    block_size: int = DEFAULT_BLOCK_SIZE,
    kv_dtype: torch.dtype | None = None,
) -> SelfTestResult:
    """Compute a few sequences in all ways, and compare their logits.

    The attention may depend on `block_size`, the number of tokens of a KV block.
    """
    if block_size > MAX_BLOCK_SIZE:
        block_size = math.gcd(block_size, MAX_BLOCK_SIZE)
    probe = _Probe(decoder, device, max_model_len, block_size, kv_dtype)
    names = list(probe.tokens)
    expected = {name: probe.compute_together([name])[name] for name in names}
    cases: dict[str, Callable[[], dict[str, Tensor]]] = {
        "batched": lambda: probe.compute_together(names),
    }
    if decoder.architecture.kv_layout.windows:  # else each sequence is computed in one step
        cases["chunked"] = lambda: probe.compute_in_chunks(names)
        cases["prefix hit"] = lambda: probe.compute_after_prefix(names)
    failed, worst = [], 0.0
    for case, compute in cases.items():
        actual = compute()
        differing = [name for name in names if not torch.equal(actual[name], expected[name])]
        if differing:
            failed.append(case)
            worst = max(worst, *(_median_difference(actual[n], expected[n]) for n in differing))
    return SelfTestResult(not failed, failed, _find_failed_draft_cases(probe, names), worst)


def compute_check(
    decoder: Model,
    device: Device,
    *,
    max_model_len: int,
    block_size: int,
    kv_dtype: torch.dtype | None,
    is_exact: bool,
) -> str:
    """Compute a short sequence alone, and return a digest of its logits, which is the same for the same weights.

    Of a model that is not exact, the digest only shows whether the logits are finite.
    """
    probe = _Probe(decoder, device, max_model_len, block_size, kv_dtype)
    name = list(probe.tokens)[1]
    logits = probe.compute_together([name])[name].contiguous()
    if not is_exact:
        return f"finite: {bool(logits.isfinite().all())}"
    return hashlib.sha256(logits.view(torch.uint8).numpy().tobytes()).hexdigest()


def _find_failed_draft_cases(probe: _Probe, names: list[str]) -> list[str]:
    """Compute the last tokens of the longest sequence one by one, and as drafts beside the other sequences."""
    longest = max(names, key=lambda name: len(probe.tokens[name]))
    others = [name for name in names if name != longest]
    num_single = min(max(DRAFT_COUNTS) + 1, len(probe.tokens[longest]) - 1)
    if not probe.can_reject_tokens or num_single < 2:
        return []
    expected = probe.compute_singly(longest, num_single)
    failed = []
    for count in DRAFT_COUNTS:
        actual = probe.compute_drafts(longest, others, num_single, count)
        if not torch.equal(actual, expected[: len(actual)]):
            failed.append(f"verify {count}")
    actual = probe.compute_after_rejected_drafts(longest, num_single)
    if not torch.equal(actual, expected[-len(actual) :]):
        failed.append("verify after rejected drafts")
    return failed


def _median_difference(actual: Tensor, expected: Tensor) -> float:
    difference = actual.log_softmax(-1) - expected.log_softmax(-1)
    return float(difference.abs().nan_to_num(torch.inf).median())


class _Probe:
    """Sequences of random tokens, computed in chunks by a decoder with a small KV cache of its own."""

    def __init__(
        self,
        decoder: Model,
        device: Device,
        max_model_len: int,
        block_size: int,
        kv_dtype: torch.dtype | None,
    ) -> None:
        vocab_size = decoder.architecture.vocab_size
        generator = torch.Generator().manual_seed(0)
        lengths = [min(length, max_model_len) for length in SEQUENCE_LENGTHS]
        lengths += [1] * NUM_SHORT_SEQUENCES
        self.tokens = {
            f"sequence {number}": torch.randint(vocab_size, (length,), generator=generator).tolist()
            for number, length in enumerate(lengths)
        }
        self._decoder = decoder
        self._device = device
        self._block_size = block_size
        self._num_groups = len(decoder.architecture.kv_layout.windows)
        num_blocks = 2 * self._num_groups * sum(-(-length // block_size) for length in lengths)
        self._attention = decoder.create_attention(num_blocks, block_size, kv_dtype)
        self._attention.ensure_block(num_blocks - 1)
        self._states = decoder.create_states(len(lengths), len(lengths))
        self._rows = {name: row for row, name in enumerate(self.tokens)}
        self._batch = PersistentBatch(
            len(lengths), max(lengths), block_size, self._num_groups, device.torch_device
        )
        self._free = list(range(num_blocks))
        self._blocks: dict[str, list[list[int]]] = {}
        """Blocks of each sequence in order. Each is a block in every KV cache group."""

    def compute_together(self, names: list[str]) -> dict[str, Tensor]:
        """Compute all sequences in one batch."""
        self._allocate(names)
        return self._run([(name, 0, len(self.tokens[name])) for name in names])

    def compute_in_chunks(self, names: list[str]) -> dict[str, Tensor]:
        """Compute all sequences in the same chunks, a batch for each chunk."""
        self._allocate(names)
        logits: dict[str, list[Tensor]] = {name: [] for name in names}
        start = 0
        longest = max(len(tokens) for tokens in self.tokens.values())
        for end in (*CHUNK_ENDS, longest):
            chunks = [
                (name, start, min(end, len(self.tokens[name])))
                for name in names
                if len(self.tokens[name]) > start
            ]
            for name, part in self._run(chunks).items() if chunks else ():
                logits[name].append(part)
            start = end
        return {name: torch.cat(parts) for name, parts in logits.items()}

    def compute_after_prefix(self, names: list[str]) -> dict[str, Tensor]:
        """Compute the rest of each sequence whose first blocks are in the cache, together with the other sequences."""
        prefixes = {
            name: self._blocks[name][: self._prefix_len(name) // self._block_size] for name in names
        }
        self._allocate(names, prefixes)
        if self._states is not None:
            rows = [self._rows[name] for name in names if prefixes[name]]
            self._states.load_snapshots([(row, row) for row in rows])
        return self._run(
            [
                (name, len(prefixes[name]) * self._block_size, len(self.tokens[name]))
                for name in names
            ]
        )

    @property
    def can_reject_tokens(self) -> bool:
        """Whether the decoder can compute other tokens in place of the last ones."""
        return self._num_groups > 0 and self._states is None

    def compute_singly(self, name: str, num_last: int) -> Tensor:
        """Compute a sequence alone, its `num_last` last tokens one by one. Returns the logits of these."""
        self._allocate([name])
        length = len(self.tokens[name])
        start = length - num_last
        self._run([(name, 0, start)])
        parts = [
            self._run([(name, end - 1, end)], num_last) for end in range(start + 1, length + 1)
        ]
        return torch.cat([part[name] for part in parts])

    def compute_drafts(
        self, name: str, others: list[str], num_last: int, num_drafts: int
    ) -> Tensor:
        """Compute the first of the `num_last` last tokens and up to `num_drafts` drafts after it, beside `others`."""
        self._allocate([name, *others])
        length = len(self.tokens[name])
        start = length - num_last
        self._run([(name, 0, start)])
        chunks = [(other, 0, len(self.tokens[other])) for other in others]
        chunks.insert(1, (name, start, min(length, start + 1 + num_drafts)))
        return self._run(chunks, num_last)[name]

    def compute_after_rejected_drafts(self, name: str, num_last: int) -> Tensor:
        """Compute the last tokens as drafts that are wrong from the second half on, and that half again."""
        self._allocate([name])
        tokens = self.tokens[name]
        length, vocab_size = len(tokens), self._decoder.architecture.vocab_size
        start, middle = length - num_last, length - num_last // 2
        self._run([(name, 0, start)])
        self.tokens[name] = tokens[:middle] + [(t + 1) % vocab_size for t in tokens[middle:]]
        self._run([(name, start, length)])
        self.tokens[name] = tokens
        return self._run([(name, middle, length)], num_last)[name]

    def _prefix_len(self, name: str) -> int:
        """Return the number of a sequence's first tokens whose blocks are the prefix of a hit."""
        return max(0, len(self.tokens[name]) - NUM_WATCHED) // self._block_size * self._block_size

    def _allocate(
        self, names: list[str], prefixes: dict[str, list[list[int]]] | None = None
    ) -> None:
        """Give each sequence new blocks after those of its prefix. Its other blocks are free again."""
        for name in names:
            prefix = (prefixes or {}).get(name, [])
            for block in self._blocks.pop(name, []):
                self._free.extend(() if block in prefix else block)
        for name in names:
            blocks = list((prefixes or {}).get(name, []))
            while len(blocks) * self._block_size < len(self.tokens[name]):
                blocks.append([self._free.pop(0) for _ in range(self._num_groups)])
            self._blocks[name] = blocks

    def _run(self, chunks: Sequence[Chunk], num_watched: int = NUM_WATCHED) -> dict[str, Tensor]:
        """Compute chunks in one batch, and return the logits of the `num_watched` last positions in each."""
        watched: list[int] = []
        counts: list[int] = []
        flat = 0
        for name, start, end in chunks:
            tokens, blocks = self.tokens[name], self._blocks[name]
            tables = [[block[group] for block in blocks] for group in range(self._num_groups)]
            self._batch.admit(
                AdmittedSequence(self._rows[name], tokens, len(tokens), SamplingParams(), tables)
            )
            first_watched = max(start, len(tokens) - num_watched)
            watched += range(flat + first_watched - start, flat + end - start)
            counts.append(max(0, end - first_watched))
            flat += end - start
        plan = self._plan(chunks)
        packed = self._batch.pack_step(plan, np.array(watched, np.int64))
        buffer = self._device.to_device(packed.buffer)
        batch, _ = self._batch.gather_batch(buffer, packed.shape)
        if self._states is not None:
            batch = self._states.attach(batch, plan)
        with torch.inference_mode():
            logits = self._decoder.forward(batch, self._attention)
        names = [name for name, _, _ in chunks]
        return dict(zip(names, logits.cpu().split(counts), strict=True))

    def _plan(self, chunks: Sequence[Chunk]) -> StepPlan:
        """Plan the chunks, and save a sequence's state at the end of its prefix, in the snapshot of its row."""
        return StepPlan(
            0,
            rows=[self._rows[name] for name, _, _ in chunks],
            starts=[start for _, start, _ in chunks],
            counts=[end - start for _, start, end in chunks],
            sample_counts=[0] * len(chunks),
            snapshot_saves=[
                (index, self._prefix_len(name), self._rows[name])
                for index, (name, start, end) in enumerate(chunks)
                if start < self._prefix_len(name) <= end
            ],
        )


# --- stored results ---------------------------------------------------------------------------------


def find_or_run(
    arithmetic_id: str, block_size: int, run: Callable[[], SelfTestResult]
) -> SelfTestResult:
    """Return the stored result for an arithmetic identity and a block size, or run the test and store its result."""
    name = f"{arithmetic_id}-{block_size}.json"
    with contextlib.suppress(OSError, msgspec.DecodeError):
        stored = (cache_folder() / "self-test" / name).read_bytes()
        return msgspec.json.decode(stored, type=SelfTestResult)
    result = run()
    with contextlib.suppress(OSError):  # the test is repeated at the next start
        folder = cache_folder() / "self-test"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(folder / name, msgspec.json.encode(result))
        results = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for old in results[:-MAX_STORED_RESULTS]:
            old.unlink(missing_ok=True)
    return result
