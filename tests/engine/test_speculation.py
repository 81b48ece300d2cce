"""Speculative decoding: drafts, right or wrong, change neither tokens nor log-probabilities nor finish reasons."""

from __future__ import annotations

import collections.abc
import itertools
from dataclasses import dataclass, replace

import msgspec
import pytest
import structlog
import torch
from torch import Tensor

from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.drafting import Draft
from argosy.engine.execution.executor.output_stage import CompletedStep
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.loading import executor_loader
from argosy.engine.execution.loading.self_test import SelfTestResult
from argosy.engine.scheduling import (
    MAX_DRAFT_TOKENS,
    Sequence,
    StepPlan,
)
from argosy.engine.serving.engine_core.core import EngineCore
from argosy.engine.serving.engine_core.speculation import Speculation
from argosy.models import BUNDLED_MODEL
from argosy.protocol import SamplingParams
from tests.engine.core_driver import RequestOutput, TickingClock, create_core, run_requests
from tests.engine.pairwise import pairwise
from tests.engine.test_core import intercept_steps
from tests.engine.test_equivalence import (
    DTYPES,
    SAMPLING_PARAMS,
    assert_equal_to_reference,
    create,
    reference_output,
    requests,
    shared_core,
)

pytestmark = pytest.mark.usefixtures("all_drafts")

KINDS = [
    *("right", "mixed", "rubbish"),
    *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("wrong", "half")),
]
SCENARIOS: dict[str, dict[str, object]] = {
    "batched": {"prefix_cache": False},
    "cached": {},
    "chunked": {"max_step_tokens": 17, "max_seqs": 5},
    "preempted": {"num_blocks": 9, "max_seqs": 8},
    "host tier": {"num_blocks": 11, "max_seqs": 3, "host_kv_bytes": 1 << 24},
}


@dataclass
class ScriptedDrafter:
    """Drafter that knows the outputs without drafts, and proposes other tokens as its kind says."""

    kind: str
    outputs: dict[str, list[int]]
    vocab_size: int
    name: str = "scripted"

    def propose(
        self, sequences: collections.abc.Sequence[Sequence], limits: collections.abc.Sequence[int]
    ) -> list[Draft]:
        return [
            Draft(self._draft(seq, limit)) for seq, limit in zip(sequences, limits, strict=True)
        ]

    def _draft(self, seq: Sequence, limit: int) -> list[int]:
        output, length = self.outputs[seq.id], seq.output_len
        right = [*output, *[7] * limit][length : length + limit]
        match self.kind:
            case "right":
                return right
            case "wrong":
                return [(token + 1) % self.vocab_size for token in right]
            case "mixed":  # of changing lengths, and wrong from changing places on
                mixed = [token + (length + i) % 5 // 4 for i, token in enumerate(right)]
                return [token % self.vocab_size for token in mixed][: length * 7 % (limit + 1)]
            case "half":
                return right if hash(seq.id) % 2 else []
            case _:
                return [*right[: length % 3], self.vocab_size + length, -length]

    def release(self, request_id: str) -> None:
        """Keep the outputs."""


def create_drafting(
    kind: str,
    dtype: str = "bfloat16",
    outputs: dict[str, list[int]] | None = None,
    **options: object,
) -> tuple[EngineCore, Speculation]:
    """Create a core with a scripted drafter of `outputs`, by default those of `requests`."""
    core = create(0, dtype, warmup=True, **options)
    assert core.speculation is not None
    outputs = outputs or {
        request.id: reference_output(number, dtype).tokens
        for number, request in enumerate(requests())
    }
    core.speculation.drafters = [ScriptedDrafter(kind, outputs, core.info.vocab_size)]
    return core, core.speculation


@pairwise(kind=KINDS, scenario=SCENARIOS, dtype=DTYPES)
def test_drafts_change_no_output(kind: str, scenario: str, dtype: str) -> None:
    """All parameters of sampling, batched, with prefix hits in a second run."""
    core, speculation = create_drafting(kind, dtype, None, **SCENARIOS[scenario])
    if scenario == "preempted":
        core.scheduler.output_estimator.fraction = 0.0
    saved_s = 0.0
    for _ in range(2 if scenario in {"cached", "host tier"} else 1):
        outputs = run_requests(core, requests())
        assert_equal_to_reference(outputs, dtype)
        saved_s += sum(output.draft_saved_s for output in outputs.values())
    assert (core.scheduler.preemptions > 0) >= (scenario == "preempted")
    accepted, drafted = (
        speculation.stats.accepted_tokens.total(),
        speculation.stats.draft_tokens.total(),
    )
    assert sum(map(sum, speculation.stats.accepted_by_position.values())) == accepted
    assert (accepted > 0) == (kind != "wrong")
    assert kind not in {"right", "half"} or accepted > 0.8 * drafted > 0
    totals = speculation.stats.totals
    assert saved_s == pytest.approx(totals["draft_gain_s_total"] - totals["draft_cost_s_total"])
    assert (saved_s > 0) == (kind in {"right", "half"}) or kind in {"mixed", "rubbish"}


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=() if number in {4, 8} else pytest.mark.exhaustive)
        for number in range(len(SAMPLING_PARAMS))
    ],
)
@pytest.mark.parametrize("kind", ["right", "mixed"])
def test_resumed_requests_with_drafts_continue_output(number: int, kind: str) -> None:
    request, reference = requests()[number], reference_output(number)
    lengths = range(1, len(reference.tokens))
    core, _ = create_drafting(kind, outputs={str(i): reference.tokens for i in lengths})
    resumed = [
        msgspec.structs.replace(request, id=str(i), resumed_tokens=reference.tokens[:i])
        for i in lengths
    ]
    for request_id, output in run_requests(core, resumed).items():
        length = int(request_id)
        assert output.tokens == reference.tokens[length:]
        assert output.logprobs == reference.logprobs[length:]
        assert output.finish == reference.finish


@pytest.mark.parametrize("kind", ["right", "mixed"])
def test_sequences_end_inside_a_window(kind: str) -> None:
    """Tokens after the end are neither delivered nor counted, whether the end is a stop token or the length."""
    stopped: list[EngineRequest] = []
    for number, request in enumerate(requests()[:6]):
        tokens = reference_output(number).tokens
        for index in (1, 4, 9):
            changes = {"stop_token_ids": [tokens[index]], "logprobs": 1, "min_tokens": 0}
            if index == 4:
                changes = {"max_tokens": index, "logprobs": 1}
            params = msgspec.structs.replace(request.params, **changes)
            changed = msgspec.structs.replace(request, id=f"{number}-{index}", params=params)
            stopped.append(changed)
    expected: dict[str, RequestOutput] = {}
    for request in stopped:
        expected |= run_requests(shared_core(), [request])
    drafts = {r.id: reference_output(int(r.id[0])).tokens for r in stopped}
    core, _ = create_drafting(kind, outputs=drafts)
    outputs = run_requests(core, stopped)
    core.add(msgspec.structs.replace(stopped[0], id="last"))
    drafts["last"] = []
    while core.has_work:
        stats = core.step().stats
    for request_id, output in outputs.items():
        assert output.tokens == expected[request_id].tokens
        assert output.logprobs == expected[request_id].logprobs
        assert output.finish == expected[request_id].finish
    assert {output.finish for output in outputs.values()} == {"stop", "length"}
    delivered = sum(len(output.tokens) for output in outputs.values())
    assert stats.generation_tokens_total == delivered + len(expected["0-1"].tokens)


@pytest.mark.parametrize("kind", ["right", "mixed"])
def test_penalties_count_drafts_of_earlier_rows_and_steps(kind: str) -> None:
    """Each token makes itself less likely than the three others, so that each depends on all counts."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=60,
        ignore_eos=True,
        allowed_token_ids=[5, 6, 7, 8],
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=1.5,
    )
    penalized = [msgspec.structs.replace(request, params=params) for request in requests()[:4]]
    expected: dict[str, RequestOutput] = {}
    for request in penalized:
        expected |= run_requests(shared_core(), [request])
    core, _ = create_drafting(kind, outputs={i: output.tokens for i, output in expected.items()})
    outputs = run_requests(core, penalized)
    assert [outputs[r.id].tokens for r in penalized] == [expected[r.id].tokens for r in penalized]


@pytest.mark.parametrize("kind", ["right", "mixed"])
def test_choices_of_a_request_draft_for_themselves(kind: str) -> None:
    request = requests()[1]
    siblings = [
        msgspec.structs.replace(
            request,
            id=str(seed),
            parent_id="0" if seed else None,
            params=msgspec.structs.replace(request.params, seed=seed, logprobs=1),
        )
        for seed in range(4)
    ]
    expected: dict[str, RequestOutput] = {}
    for sibling in siblings:
        expected |= run_requests(shared_core(), [msgspec.structs.replace(sibling, parent_id=None)])
    core, _ = create_drafting(kind, outputs={i: output.tokens for i, output in expected.items()})
    for request_id, output in run_requests(core, siblings).items():
        assert output.tokens == expected[request_id].tokens
        assert output.logprobs == expected[request_id].logprobs


@pytest.mark.parametrize("first_row", [0, 2])
def test_drafts_with_non_finite_logits_fail_no_request(first_row: int) -> None:
    """A draft whose keys are not finite spoils the logits of earlier rows of its step."""
    core, speculation = create_drafting("right", prefix_cache=False)
    model = core.executor._model  # noqa: SLF001 - the test replaces a method
    forward = model.forward

    def forward_with_nan(batch: Batch, attention: Attention) -> Tensor:
        logits = forward(batch, attention)
        for start, end in itertools.pairwise(batch.query_start_loc.tolist()):
            if 1 < end - start <= 1 + MAX_DRAFT_TOKENS:
                spoiled = (batch.logit_index >= start + first_row) & (batch.logit_index < end)
                logits[spoiled] = torch.nan
        return logits

    long_prompts = [r for r in requests() if len(r.prompt) > 1 + MAX_DRAFT_TOKENS]
    model.forward = forward_with_nan  # type: ignore[method-assign]
    assert_equal_to_reference(run_requests(core, long_prompts))
    assert speculation.stats.draft_tokens.total() > 0


@pytest.mark.parametrize("error", [RuntimeError("bad step"), MemoryError()], ids=repr)
def test_steps_that_fail_are_repeated_without_drafts(error: Exception) -> None:
    core, _ = create_drafting("mixed")

    def fail(plan: StepPlan) -> None:
        if len(plan.draft_tokens) > 2:
            raise error

    intercept_steps(core, fail)
    assert_equal_to_reference(run_requests(core, requests()))


def test_requests_without_speculation_run_beside_others() -> None:
    core, speculation = create_drafting("right")
    plain, drafted = requests()[:2]
    plain = msgspec.structs.replace(plain, speculation=False)
    assert_equal_to_reference(run_requests(core, [plain]))
    assert not speculation.stats.draft_tokens
    assert_equal_to_reference(run_requests(core, [plain, drafted]))
    assert 0 < speculation.stats.draft_tokens.total() < len(reference_output(1).tokens)


@pytest.mark.parametrize(
    ("seconds", "event"),
    [(0.0, "drafter_failed"), (0.3, "drafter_too_slow"), (1e9, "drafter_too_slow")],
)
def test_drafter_that_raises_or_takes_too_long_is_not_asked_again(
    seconds: float, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single call that takes too long, however long, may be the machine's fault."""
    core, speculation = create_drafting("right")
    drafter = speculation.drafters[0]
    propose, calls = drafter.propose, itertools.count(1)
    clock = core._clock  # noqa: SLF001 - the drafter spends time of the core's clock
    assert isinstance(clock, TickingClock)

    def fail(
        sequences: collections.abc.Sequence[Sequence], limits: collections.abc.Sequence[int]
    ) -> list[Draft]:
        if next(calls) > 3 and not seconds:
            raise RuntimeError
        clock.now += seconds
        return propose(sequences, limits)

    monkeypatch.setattr(drafter, "propose", fail)
    with structlog.testing.capture_logs() as logs:
        assert_equal_to_reference(run_requests(core, requests()))
    assert [log["event"] for log in logs if log.get("drafter") == "scripted"] == [event]
    assert next(calls) == (5 if not seconds else 4)
    assert not speculation.drafters


def test_grammar_with_slow_masks_has_fewer_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft has a mask of its own, for which other requests would wait."""
    constrained = [request for request in requests() if request.params.grammar]
    core, speculation = create_drafting("right")
    submit = core.executor.submit

    def submit_slowly(plan: StepPlan) -> CompletedStep:
        result = submit(plan).result()
        return CompletedStep(replace(result, durations=result.durations._replace(mask_fill_s=10.0)))

    monkeypatch.setattr(core.executor, "submit", submit_slowly)
    assert_equal_to_reference(run_requests(core, constrained))
    first = speculation.stats.drafts.total()
    assert first <= len(constrained)
    assert_equal_to_reference(run_requests(core, requests()[:2]))
    assert speculation.stats.drafts.total() > first


@pytest.mark.parametrize(
    "options",
    [{"warmup": False}, {"speculation": "off"}, {"max_steps_in_flight": 1}, {}],
    ids=str,
)
def test_there_are_no_drafts_without_proof_that_they_are_exact(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not options:
        result = SelfTestResult(True, [], ["verify 4"], 0.0)
        monkeypatch.setattr(executor_loader, "find_or_run", lambda *_: result)
    with structlog.testing.capture_logs() as logs:
        core = create_core(BUNDLED_MODEL, **({"warmup": True, "dtype": "bfloat16"} | options))
    assert core.speculation is None
    assert core.info.no_drafts_reason
    reasons = [log["reason"] for log in logs if log["event"] == "speculation_disabled"]
    assert len(reasons) == ("speculation" not in options)
    assert options or "verify 4" in reasons[0] == core.info.no_drafts_reason
    assert_equal_to_reference(run_requests(core, requests()[:2]))
