"""Draft model: its drafts change no output, and do not depend on what it computed for which sequence before."""

from __future__ import annotations

import collections.abc
import itertools
import json
import shutil
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.executor.draft_model import MAX_CATCH_UP_TOKENS, DraftModel
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.layers.model import Model
from argosy.engine.scheduling import DraftCandidate, DraftLengthPolicy, Scheduler, Sequence
from argosy.engine.serving.engine_core.core import EngineCore
from argosy.models import BUNDLED_MODEL, DRAFT_MODEL
from argosy.protocol import SamplingParams
from tests.engine.core_driver import create_core, run_requests
from tests.engine.decoder_driver import DecoderDriver, load_checkpoint
from tests.engine.test_equivalence import assert_equal_to_reference, create, requests
from tests.engine.test_families import FAMILIES, MODELS
from tests.engine.transformers_reference import make_reference

SCENARIOS: dict[str, dict[str, object]] = {
    "batched": {"prefix_cache": False},
    "cached": {},
    "chunked": {"max_step_tokens": 17, "max_seqs": 5},
    "short blocks": {"block_size": 8, "num_blocks": 1024},
    "preempted": {"num_blocks": 9, "max_seqs": 8},
    "host tier": {"num_blocks": 11, "max_seqs": 3, "host_kv_bytes": 1 << 24},
}
LONG_PROMPT = [5 + number * 37 % 3000 for number in range(6 * 64)]


def create_with_draft_model(
    draft: Path = DRAFT_MODEL, options: dict[str, object] | None = None
) -> tuple[EngineCore, DraftModel]:
    core = create(0, "bfloat16", warmup=True, draft_model=str(draft), **(options or {}))
    assert core.speculation is not None
    assert core.speculation.draft_model is not None
    core.speculation.drafters = []
    return core, core.speculation.draft_model


@pytest.fixture(autouse=True)
def changing_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify drafts of changing lengths, whatever their chances."""
    numbers = itertools.count()

    def select_some(
        policy: DraftLengthPolicy, candidates: list[DraftCandidate], *counts: int
    ) -> list[int]:
        return [next(numbers) % 7 % (candidate.size + 1) for candidate in candidates]

    monkeypatch.setattr(DraftLengthPolicy, "select_lengths", select_some)


def count_tokens(monkeypatch: pytest.MonkeyPatch, model: Model) -> list[int]:
    """Return the list to which each forward pass of a model adds its number of tokens."""
    forward, counts = model.forward, list[int]()

    def count(batch: Batch, attention: Attention) -> Tensor:
        counts.append(len(batch.token_ids))
        return forward(batch, attention)

    monkeypatch.setattr(model, "forward", count)
    return counts


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_drafts_depend_on_tokens_only_and_change_no_output(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same drafts follow from a draft model that has computed nothing before."""
    core, draft_model = create_with_draft_model(options=SCENARIOS[scenario])
    if scenario == "preempted":
        core.scheduler.output_estimator.fraction = 0.0
    model, propose = load_checkpoint(DRAFT_MODEL, torch.bfloat16), draft_model.propose
    limits_alone = replace(core.scheduler.limits, num_blocks=40)
    numbers = itertools.count()

    def compare(
        sequences: collections.abc.Sequence[Sequence], limits: collections.abc.Sequence[int]
    ) -> list[list[int]]:
        drafts = propose(sequences, limits)
        for seq, limit, tokens in zip(sequences, limits, drafts, strict=True):
            # A sequence without drafts waits for others to catch up.
            if tokens and next(numbers) % 11 == 0:
                fresh = DraftModel(model, create_cpu_device(1), limits_alone)
                alone = copy(seq)
                alone.block_tables = [list(range(len(seq.block_tables[0])))]
                assert fresh.propose([alone], [limit]) == [tokens]
        return drafts

    monkeypatch.setattr(draft_model, "propose", compare)
    # Attention with AMX sums in another order for short blocks, which is another arithmetic identity.
    block_size = core.info.block_size
    plain = create(0, "bfloat16", prefix_cache=False, block_size=block_size)
    expected = run_requests(plain, requests())
    for _ in range(2):
        outputs = run_requests(core, requests())
        assert outputs == {
            key: replace(output, cached_tokens=outputs[key].cached_tokens)
            for key, output in expected.items()
        }
    assert (core.scheduler.preemptions > 0) >= (scenario == "preempted")
    speculation = core.speculation
    assert speculation is not None
    assert speculation.draft_model is draft_model, "a comparison failed"
    assert (
        0
        < speculation.stats.accepted_tokens["draft_model"]
        < speculation.stats.draft_tokens["draft_model"]
    )


def test_model_that_drafts_for_itself_is_always_right() -> None:
    """Sampled drafts have the random numbers of the tokens that they guess."""
    core, _ = create_with_draft_model(BUNDLED_MODEL)
    run_requests(core, [requests()[number] for number in (0, 1, 3)])
    speculation = core.speculation
    assert speculation is not None
    assert (
        speculation.stats.accepted_tokens["draft_model"]
        == speculation.stats.draft_tokens["draft_model"]
        > 0
    )


def test_prompts_are_caught_up_in_bounded_chunks_once_for_each_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, draft_model = create_with_draft_model()
    counts = count_tokens(monkeypatch, draft_model._model)  # noqa: SLF001 - the test counts its calls
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    first, second = (
        EngineRequest(id=name, prompt=[*LONG_PROMPT, ord(name)], params=params) for name in "ab"
    )
    run_requests(core, [first])
    assert max(counts) == MAX_CATCH_UP_TOKENS
    assert sum(counts) > len(LONG_PROMPT)
    counts.clear()
    output = run_requests(core, [second])["b"]
    assert output.cached_tokens == len(LONG_PROMPT)
    assert max(counts) < 2 * core.scheduler.limits.block_size


def test_other_cache_domain_shares_no_drafted_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    core, draft_model = create_with_draft_model()
    counts = count_tokens(monkeypatch, draft_model._model)  # noqa: SLF001 - the test counts its calls
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for domain in ("one", "two"):
        counts.clear()
        request = EngineRequest(id=domain, prompt=LONG_PROMPT, params=params, cache_domain=domain)
        run_requests(core, [request])
        assert max(counts) == MAX_CATCH_UP_TOKENS


def test_draft_model_that_raises_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    core, draft_model = create_with_draft_model()
    propose, calls = draft_model.propose, iter(range(5))

    def fail(
        sequences: collections.abc.Sequence[Sequence], limits: collections.abc.Sequence[int]
    ) -> list[list[int]]:
        next(calls)
        return propose(sequences, limits)

    monkeypatch.setattr(draft_model, "propose", fail)
    assert_equal_to_reference(run_requests(core, requests()))
    assert core.speculation is not None
    assert core.speculation.draft_model is None


def test_tokens_that_the_draft_model_lacks_change_no_output() -> None:
    """The target's vocabulary may be padded to a larger size."""
    core, draft_model = create_with_draft_model()
    draft_model._vocab_size = 2000  # noqa: SLF001 - as if its embedding were smaller
    assert_equal_to_reference(run_requests(core, requests()))


def test_draft_model_is_refused_or_unused_where_it_cannot_draft(tmp_path: Path) -> None:
    other = shutil.copytree(DRAFT_MODEL, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_bytes())
    tokenizer["model"]["merges"].pop()
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"other cannot draft for .*tokenizer is another one"):
        create_core(BUNDLED_MODEL, warmup=True, draft_model=str(other))
    useless: list[dict[str, object]] = [
        {"warmup": False},
        {"speculation": "off"},
        {"max_steps_in_flight": 1},
    ]
    for options in useless:
        all_options = {"warmup": True, "draft_model": str(DRAFT_MODEL)} | options
        assert create_core(BUNDLED_MODEL, **all_options).speculation is None


@pytest.mark.parametrize("family", ["gemma 3", "deepseek 2 lite"])
def test_greedy_drafts_continue_as_the_model_alone(family: str, tmp_path: Path) -> None:
    """Layers with windows have blocks of their own, and their blocks are copied with the others."""
    kind, options = FAMILIES[family]
    path = make_reference(tmp_path, kind, options, model=MODELS.get(kind, "")).path
    model = load_checkpoint(path)
    limits = create(0).scheduler.limits
    draft_model = DraftModel(model, create_cpu_device(1), limits)
    params = SamplingParams(temperature=0.0, max_tokens=100)
    prompt = [3 + number * 5 % 90 for number in range(29)]
    seq = Scheduler(limits).add(EngineRequest(id="a", prompt=prompt, params=params), now=0.0)
    seq.row, seq.block_tables = 0, [[5, 3, 9, 7, 8]]
    driver = DecoderDriver(model)
    for limit in (1, 3, 8, 2, 9, 5):
        expected = driver.greedy([seq.tokens], limit)
        assert draft_model.propose([seq], [limit]) == expected
        seq.tokens += [*expected[0][: limit - 1], seq.tokens[-1]]
