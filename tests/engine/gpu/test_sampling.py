"""Sampling on the GPU: exactly the tokens of the CPU, with every parameter and edit of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from argosy.engine.execution.executor.draft_windows import DraftWindows
from argosy.engine.execution.executor.sampler import Sampler
from argosy.engine.execution.kernels.gpu.device import create_cuda_device
from argosy.engine.execution.kernels.gpu.sampling import VOCAB_TILE, TritonSamplingOps
from argosy.engine.execution.kernels.torch.logit_edits import TokenMasks, TorchLogitSampler
from argosy.engine.execution.kernels.torch.sampling_ops import (
    LOG2E,
    SamplingMetadata,
    TorchSamplingOps,
)
from argosy.engine.grammar.token_mask import build_mask
from argosy.engine.scheduling import AdmittedSequence, StepPlan
from argosy.protocol import SamplingParams
from tests.engine.gpu.device import DEVICE, INTERPRETED
from tests.engine.gpu.host_device import HostDevice
from tests.engine.pairwise import pairwise
from tests.engine.test_sampler import NEG_INF, random_wide_logits
from tests.engine.test_sampler import random_metadata as random_sampling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy replaces the GPU here
GPU = HostDevice() if INTERPRETED else create_cuda_device()
VOCABS = (1, 5, 160, VOCAB_TILE, 2 * VOCAB_TILE + 77)


def random_logits(rows: int, vocab: int, spread: float = 3.0) -> torch.Tensor:
    return random_wide_logits(rows + vocab, rows, vocab, spread, torch.float32)


def random_metadata(rows: int, vocab: int, scale: float | None = None) -> SamplingMetadata:
    """Return random combinations of all parameters, of which some have extreme random values."""
    rng = np.random.default_rng(rows)
    metadata = random_sampling(rows + vocab, rows, vocab)
    metadata.random_values[:] = rng.choice([*metadata.random_values, 0.0, 1 - 2**-53], rows)
    if scale is not None:
        metadata.logit_scale[:] = scale
    return metadata


def sample_on_gpu(logits: torch.Tensor, metadata: SamplingMetadata) -> list[int]:
    tokens = TritonSamplingOps(GPU).sample(logits.to(DEVICE), metadata)
    assert tokens.dtype == torch.int64
    return [int(token) for token in tokens]


@pairwise(vocab=VOCABS, spread=[0.0, 0.3, 3.0, 60.0], dtype=[torch.float32, torch.bfloat16])
def test_sampling_matches_torch(vocab: int, spread: float, dtype: torch.dtype) -> None:
    logits = random_logits(12, vocab, spread).to(dtype)
    logits[3, 1:] = NEG_INF
    logits[4, : vocab // 2] = NEG_INF
    logits[5] = -0.0  # equal to 0, but not in its bits
    logits[5, ::3] = 0.0
    logits[6:9] = logits[6:9].round()  # ties at the cut, in several tiles
    metadata = random_metadata(12, vocab)
    assert sample_on_gpu(logits, metadata) == TorchSamplingOps().sample(logits, metadata).tolist()


CUTS = [(1, 1.0), (7, 1.0), (2999, 1.0), (3000, 0.0), (3000, 0.5), (50, 0.9), (2999, 0.999)]
"""Pairs of top-k and top-p."""


@pytest.mark.parametrize("top_k", [True, False])
@pytest.mark.parametrize("top_p", [True, False])
def test_every_set_of_cuts_matches_torch(top_k: bool, top_p: bool) -> None:
    """The number of passes depends on whether a row has both."""
    cuts = [(k, p) for k, p in CUTS if (k < 3000) <= top_k and (p < 1.0) <= top_p]
    logits, metadata = random_logits(len(cuts) + 1, 3000), random_metadata(len(cuts) + 1, 3000, 1.0)
    metadata.top_k[:], metadata.top_p[:] = zip(*cuts, (3000, 1.0), strict=True)
    assert sample_on_gpu(logits, metadata) == TorchSamplingOps().sample(logits, metadata).tolist()


def test_greedy_selects_first_of_equal_logits() -> None:
    vocab = 2 * VOCAB_TILE + 77
    logits = random_logits(4, vocab)
    logits[1] = 0.0
    logits[2, [5, VOCAB_TILE + 1]] = 99.0
    logits[3, -1] = 99.0
    tokens = sample_on_gpu(logits, random_metadata(4, vocab, scale=0.0))
    assert tokens == [int(logits[0].argmax()), 0, 5, vocab - 1]


@pytest.mark.parametrize(
    "value", [float("nan"), -float("nan"), float("inf")], ids=["nan", "-nan", "inf"]
)
def test_invalid_logits_give_no_token(value: float) -> None:
    logits = random_logits(6, VOCAB_TILE + 9)
    logits[1, -1], logits[2, 0], logits[4] = value, value, NEG_INF
    for scale in (LOG2E, 0.0):
        tokens = sample_on_gpu(logits, random_metadata(6, VOCAB_TILE + 9, scale))
        assert [token < 0 for token in tokens] == [False, True, True, False, True, False]


def test_batch_does_not_change_sampled_token() -> None:
    logits, metadata = random_logits(6, 300), random_metadata(6, 300)
    unbatched = [
        sample_on_gpu(logits[i : i + 1], metadata.select_rows(np.array([i])))[0] for i in range(6)
    ]
    assert unbatched == sample_on_gpu(logits, metadata)
    assert sample_on_gpu(logits[:0], metadata.select_rows(np.arange(0))) == []


@pytest.mark.parametrize("num_top", [0, 40])
@pytest.mark.parametrize("vocab", [41, VOCAB_TILE + 77])
def test_logprobs_match_torch(vocab: int, num_top: int) -> None:
    logits = random_logits(5, vocab)
    logits[2] = logits[2].round()  # ties
    logits[3, 0] = float("nan")
    tokens = torch.tensor([0, vocab - 1, 3, -1, -1])
    rows, counts = np.array([4, 2, 1, 3]), np.array([num_top, num_top, 0, 0])
    expected = TorchSamplingOps().launch_logprobs(logits, tokens, rows, counts)()
    on_gpu = (logits.to(DEVICE), tokens.to(DEVICE))
    read = TritonSamplingOps(GPU).launch_logprobs(*on_gpu, rows, counts)
    GPU.record_event().synchronize()
    result = read()
    assert np.isnan(result.token_logprobs[3])
    for name, count in (("tokens", 3), ("token_logprobs", 3), ("ranks", 3), ("top_ids", 2)):
        assert getattr(result, name)[:count].tolist() == getattr(expected, name)[:count].tolist()
    assert result.top_logprobs[:2].tolist() == expected.top_logprobs[:2].tolist()


EDIT_VOCAB = VOCAB_TILE + 77
EDITS: dict[str, dict[str, object]] = {
    "none": {},
    "bias": {"logit_bias": {4: 3.0, EDIT_VOCAB - 1: 9.0}},
    "allowed": {"allowed_token_ids": (5, 2, EDIT_VOCAB - 1), "logit_bias": {5: 1.0, 9: 50.0}},
    "banned": {"banned_token_ids": (5, 7), "logit_bias": {5: 50.0, 6: 4.0, 8: 5.0}},
    "early": {"min_tokens": 2, "logit_bias": {0: 9.0, 1: 9.0}},
    "many": {"banned_token_ids": tuple(range(300))},
    "repetition": {"repetition_penalty": 1.3, "logit_bias": {1: 9.0, 2: 9.0}},
    "counts": {"frequency_penalty": 0.7, "presence_penalty": -0.4, "logit_bias": {3: 5.0, 4: 5.0}},
    "mask": {"presence_penalty": 1.5, "logit_bias": {40: 9.0}},
    "all": {
        "repetition_penalty": 0.8,
        "frequency_penalty": 0.1,
        "logit_bias": {64: 3.0},
        "allowed_token_ids": tuple(range(3, 99)),
        "banned_token_ids": (64,),
        "min_tokens": 9,
        "top_k": 40,
        "top_p": 0.8,
        "min_p": 0.01,
    },
}


class RecordingOps(TorchSamplingOps):
    """Sampling operations of the CPU, which keep the edited logits."""

    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        self.edited = logits.clone()
        return super().sample(logits, metadata)


def create_samplers() -> tuple[Sampler, RecordingOps, Sampler]:
    """Return samplers of the CPU and the GPU, with a row for each edit. Every other one has log-probabilities."""
    size, ops = (len(EDITS), EDIT_VOCAB), RecordingOps()
    cpu = Sampler(*size, TorchLogitSampler(ops, *size))
    gpu = Sampler(*size, GPU.create_logit_sampler(*size))
    tokens = [1, 2, 3, EDIT_VOCAB - 1, 4, 4, 1]
    for sampler in (cpu, gpu):
        for row, edit in enumerate(EDITS.values()):
            params = SamplingParams(seed=row, **edit, logprobs=2 if row % 2 else None)  # type: ignore[arg-type]
            sampler.admit(AdmittedSequence(row, tokens, 4, params, []), [0, 1])
    return cpu, ops, gpu


def test_edited_logits_and_tokens_match_cpu() -> None:
    """Sampled tokens count for the penalties of later steps."""
    cpu, ops, gpu = create_samplers()
    rows, masked = np.arange(len(EDITS)), np.array([list(EDITS).index("mask")])
    words = torch.from_numpy(build_mask(np.arange(EDIT_VOCAB) % 8 == 0))[None]
    for position in range(4, 8):
        logits = random_logits(len(EDITS), EDIT_VOCAB, 0.2 * position)
        positions = np.full(len(EDITS), position)
        gpu_logits = logits.to(DEVICE, copy=True)
        tokens, read = cpu(logits.clone(), rows, positions, TokenMasks(masked, words))
        masks = TokenMasks(masked, words.to(DEVICE))
        gpu_tokens, gpu_read = gpu(gpu_logits, rows, positions, masks)
        sampled = tokens.tolist()
        GPU.record_event().synchronize()
        assert gpu_tokens.tolist() == sampled
        assert gpu_read(sampled) == read(sampled)
        assert torch.equal(gpu_logits[::2].cpu(), ops.edited[::2])
        assert torch.equal(gpu_logits[1::2].cpu(), logits[1::2]), "log-probabilities need these"


def test_drafts_count_for_penalties() -> None:
    drafts = {0: [3, 3], 2: [1]}
    plan = StepPlan(0, rows=[7, 0, 6], sample_counts=[3, 1, 2], draft_tokens=drafts)
    rows, positions = np.array([7, 7, 7, 0, 6, 6]), np.array([7, 8, 9, 7, 7, 8])
    cpu, _, gpu = create_samplers()
    for _ in range(3):
        logits, windows = random_logits(6, EDIT_VOCAB, 0.5), DraftWindows(plan)
        tokens, read = cpu(logits.clone(), rows, positions, windows=windows)
        gpu_tokens, gpu_read = gpu(logits.to(DEVICE, copy=True), rows, positions, windows=windows)
        GPU.record_event().synchronize()
        assert gpu_tokens.tolist() == tokens.tolist()
        assert gpu_read(tokens.tolist()) == read(tokens.tolist())


@pytest.mark.parametrize("token", [0, 1, 4, 5, 9])  # early, penalised, biased, allowed, and not
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_edits_do_not_hide_invalid_logits(value: float, token: int) -> None:
    logits = random_logits(len(EDITS), EDIT_VOCAB)
    logits[:, token] = value
    rows = np.arange(len(EDITS))
    tokens, read = create_samplers()[2](logits.to(DEVICE), rows, np.full_like(rows, 7))
    GPU.record_event().synchronize()
    assert tokens.tolist() == [-1] * len(EDITS)
    assert not read(tokens.tolist())
