"""Snapshots of recurrent states: which prefixes hit, and that sequences start from no other state than their own."""

from __future__ import annotations

import pytest

from argosy.engine.scheduling import StepResult
from tests.support.fake_executor import reference_output
from tests.support.scheduler_harness import SchedulerHarness, scheduler_limits

PROMPT = list(range(18))
"""Four blocks and a half."""


def build_harness(**changes: object) -> SchedulerHarness:
    return SchedulerHarness(scheduler_limits(**{"num_blocks": 64, "state_snapshots": 8} | changes))


def count_hits(
    harness: SchedulerHarness, name: str, prompt: list[int], domain: str = "", max_tokens: int = 6
) -> int:
    """Run a request alone, and return the number of its tokens that were cached."""
    seq = harness.add(name, prompt, max_tokens, cache_domain=domain)
    harness.run()
    assert harness.outputs[name] == reference_output(prompt, max_tokens)
    return seq.hit_tokens


def test_prompt_and_next_turn_hit_at_the_last_block_before_their_new_tokens() -> None:
    harness = build_harness()
    assert count_hits(harness, "first", PROMPT) == 0
    assert count_hits(harness, "same prompt", PROMPT) == 16
    turn = PROMPT + reference_output(PROMPT, 6) + [7, 7]
    assert count_hits(harness, "next turn", turn) == 20  # of the 23 tokens with keys and values
    assert count_hits(harness, "other domain", PROMPT, "other") == 0


@pytest.mark.parametrize("length", [16, 17])
def test_prompt_that_ends_with_a_block_hits_before_that_block(length: int) -> None:
    harness = build_harness()
    count_hits(harness, "first", PROMPT[:length])
    assert count_hits(harness, "second", PROMPT[:length]) == (length - 1) // 4 * 4


def test_shared_prefix_of_different_prompts_hits_from_the_third_prompt_on() -> None:
    """The second prompt finds cached blocks without a snapshot, and saves one where it leaves the first prompt."""
    harness = build_harness(state_snapshots=16)
    hits = [count_hits(harness, str(n), [*PROMPT[:10], 30 + n] + [9] * 12) for n in range(4)]
    assert hits == [0, 0, 8, 8]


def test_newer_snapshots_of_a_sequence_evict_its_older_ones_first() -> None:
    harness = build_harness(state_snapshots=5)
    count_hits(harness, "first", PROMPT)
    count_hits(harness, "long output", [50] * 5, max_tokens=60)
    assert count_hits(harness, "same prompt", PROMPT) == 16


def test_preempted_sequence_resumes_from_its_newest_snapshot() -> None:
    harness = build_harness(state_snapshots=32)
    seq = harness.add("low", PROMPT, 30, tier=2)
    while seq.output_len < 9:
        harness.step()
    for number in range(4):  # fills the batch
        harness.add(f"high {number}", [60 + number] * 5, 9)
    while seq.row >= 0:
        harness.step()
    while seq.row < 0:
        harness.step()
    assert seq.computed_len >= 24
    harness.run()
    assert harness.outputs["low"] == reference_output(PROMPT, 30)


@pytest.mark.parametrize(("state_snapshots", "hits"), [(0, 0), (8, 16)])
def test_siblings_compute_their_own_state(state_snapshots: int, hits: int) -> None:
    harness = build_harness(state_snapshots=state_snapshots)
    harness.add("lead", PROMPT, 9)
    siblings = [harness.add(f"sibling {n}", PROMPT, 9, parent_id="lead") for n in range(3)]
    harness.run()
    assert all(output == reference_output(PROMPT, 9) for output in harness.outputs.values())
    assert {seq.hit_tokens for seq in siblings} == {hits}


@pytest.mark.parametrize("state_snapshots", [1, 3, 20])
def test_steps_planned_ahead_do_not_mix_up_states(state_snapshots: int) -> None:
    """Too few blocks for all prompts preempt sequences whose next step is in flight."""
    harness = build_harness(num_blocks=30, state_snapshots=state_snapshots, max_step_tokens=13)
    harness.scheduler.output_estimator.fraction = 0.0
    prompts = {str(n): PROMPT[: 6 + n] + [40 + n % 2] * 20 for n in range(6)}
    for name, prompt in prompts.items():
        harness.add(name, prompt, 40)
    results: list[StepResult] = []
    for _ in range(2000):
        if not harness.scheduler.has_work:
            break
        results.append(harness.executor.execute(harness.scheduler.schedule(harness.now)))
        if len(results) == 2:
            for seq, _, token, _ in harness.scheduler.commit(results.pop(0)):
                harness.outputs[seq.id].append(token)
            harness.scheduler.check_invariants()
    assert harness.scheduler.preemptions > 0
    for name, prompt in prompts.items():
        tokens = [token for token in harness.outputs[name] if token >= 0]
        assert tokens == reference_output(prompt, 40)
