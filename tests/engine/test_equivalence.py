"""Same bytes whatever the batch: every way to run a request gives its tokens and log-probabilities."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

import msgspec
import pytest

from argosy.engine.serving.core_messages import EngineRequest
from argosy.models import BUNDLED_MODEL
from argosy.protocol import SamplingParams
from tests.engine.core_driver import Answer, core_of, run

if TYPE_CHECKING:
    from argosy.engine.serving.engine_core.core import EngineCore

DEFAULT = "default"
"""The path that the engine takes by itself: the full set of cases runs on it."""
VARIETY = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, seed=2, max_tokens=20, logprobs=0, min_tokens=10),
    SamplingParams(temperature=1.2, top_k=20, min_p=0.02, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(
        temperature=0.7,
        seed=4,
        max_tokens=24,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logprobs=1,
        ignore_eos=True,
    ),
    SamplingParams(
        temperature=0.0, logit_bias={5: 3.0, 300: -100.0}, max_tokens=16, ignore_eos=True
    ),
    SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=1, ignore_eos=True),
]


def weights_of(dtype: str) -> dict[str, str]:
    """The options of a core whose weights are held so."""
    quantized = dtype.startswith("int")
    return {"dtype": "bfloat16", "quantize": dtype} if quantized else {"dtype": dtype}


@cache
def plain_core(dtype: str = "bfloat16", path: str = DEFAULT) -> EngineCore:
    """One core for each dtype and path; the path is the one of the running test."""
    return core_of(BUNDLED_MODEL, prefix_cache=False, **weights_of(dtype))


@cache
def requests() -> list[EngineRequest]:
    """Prompts of many lengths, some with a shared beginning."""
    rng = random.Random(5)
    shared = [rng.randint(5, 4000) for _ in range(40)]
    made = []
    for number in range(14):
        own = [rng.randint(5, 4000) for _ in range(rng.randint(1, 60))]
        prompt = shared[: rng.choice([0, 0, 33, 40])] + own
        params = VARIETY[number % len(VARIETY)]
        made.append(EngineRequest(id=str(number), prompt=prompt, params=params))
    return made


@cache
def alone(dtype: str = "bfloat16", path: str = DEFAULT) -> dict[str, Answer]:
    """The reference: each request by itself, its prompt in one piece."""
    found: dict[str, Answer] = {}
    for request in requests():
        found |= run(plain_core(dtype, path), [request])
    return found


@pytest.fixture(params=[0, 1], ids=lambda depth: f"inflight{depth}", name="depth")
def a_depth(request: pytest.FixtureRequest) -> int:
    """How many steps are under way while the next one is planned."""
    depth: int = request.param
    return depth


def same(answers: dict[str, Answer], dtype: str = "bfloat16", path: str = DEFAULT) -> None:
    for name, answer in answers.items():
        expected = alone(dtype, path)[name]
        assert answer.tokens == expected.tokens, f"request {name}"
        assert answer.logprobs == expected.logprobs
        assert answer.prompt_logprobs == expected.prompt_logprobs
        assert answer.finish == expected.finish


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "int4"])
def test_batched(dtype: str, depth: int) -> None:
    core = core_of(
        BUNDLED_MODEL, max_steps_in_flight=depth, prefix_cache=False, **weights_of(dtype)
    )
    same(run(core, requests()), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "int4"])
@pytest.mark.parametrize("budget", [8, 17, 64])
def test_chunked(budget: int, dtype: str, depth: int) -> None:
    core = core_of(
        BUNDLED_MODEL,
        max_steps_in_flight=depth,
        max_step_tokens=budget,
        max_seqs=5,
        **weights_of(dtype),
    )
    same(run(core, requests()), dtype)


def test_batched_and_chunked_on_every_path(path: str) -> None:
    """Decodes beside decodes, and beside pieces of prompts: the sizes of batch that kernels tell apart."""
    same(run(plain_core(path=path), requests()), path=path)
    core = core_of(BUNDLED_MODEL, max_step_tokens=17, max_seqs=5, dtype="bfloat16")
    same(run(core, requests()), path=path)


@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_prefix_hits(dtype: str, depth: int) -> None:
    core = core_of(BUNDLED_MODEL, max_steps_in_flight=depth, **weights_of(dtype))
    run(core, requests())
    again = run(core, requests())
    assert sum(answer.cached_tokens or 0 for answer in again.values()) > 100
    same(again, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_preemption_in_a_tiny_pool(dtype: str, depth: int) -> None:
    core = core_of(
        BUNDLED_MODEL, max_steps_in_flight=depth, num_blocks=11, max_seqs=8, **weights_of(dtype)
    )
    core.scheduler.output_estimator.fraction = 0.0
    same(run(core, requests()), dtype)
    assert core.scheduler.preemptions > 0


def test_lower_tiers_that_stand_back(depth: int) -> None:
    """A premium request comes while others decode: its first token has a step of its own."""
    premium, *others = requests()
    core = core_of(BUNDLED_MODEL, max_steps_in_flight=depth, dtype="bfloat16")
    answers = {request.id: Answer() for request in requests()}
    stood_back = False
    for request in others:
        core.add(request)
    for step in range(100):
        if step == 3:
            core.add(msgspec.structs.replace(premium, tier=0))
        outputs = core.step()
        for delta in outputs.deltas:
            answers[delta.id].take(delta)
        several = outputs.stats.running > 2
        stood_back |= several and [delta.id for delta in outputs.deltas] == [premium.id]
    assert stood_back
    same(answers)


def test_host_tier(depth: int) -> None:
    core = core_of(
        BUNDLED_MODEL,
        max_steps_in_flight=depth,
        dtype="bfloat16",
        num_blocks=11,
        max_seqs=3,
        host_kv_bytes=1 << 24,
    )
    same(run(core, requests()))
    same(run(core, requests()))
    assert core.scheduler.kv_cache.host_hit_tokens > 0


def test_rotten_host_blocks_are_recomputed_and_counted(depth: int) -> None:
    core = core_of(
        BUNDLED_MODEL,
        max_steps_in_flight=depth,
        dtype="bfloat16",
        num_blocks=11,
        max_seqs=3,
        host_kv_bytes=1 << 24,
    )
    run(core, requests())
    for block in core.executor.host_store.blocks.values():  # type: ignore[attr-defined]
        block.numpy()[7] ^= 1
    same(run(core, requests()))
    assert core.scheduler.kv_cache.corrupt_blocks > 0


@pytest.mark.parametrize("number", range(len(VARIETY)), ids=lambda number: f"params{number}")
def test_resume_at_every_token(number: int, depth: int) -> None:
    request, whole = requests()[number], alone()[str(number)]
    resumed = [
        msgspec.structs.replace(request, id=str(index), resumed_tokens=whole.tokens[:index])
        for index in range(1, len(whole.tokens))
    ]
    core = core_of(BUNDLED_MODEL, max_steps_in_flight=depth, dtype="bfloat16")
    for name, answer in run(core, resumed).items():
        index = int(name)
        assert answer.tokens == whole.tokens[index:]
        assert answer.logprobs == whole.logprobs[index:]
        assert answer.finish == whole.finish


def test_siblings_fork(depth: int) -> None:
    """`n` choices: the siblings take over the lead's prompt, and each is what it would be alone."""
    request = requests()[1]
    several = [
        msgspec.structs.replace(
            request,
            id=str(index),
            parent_id=None if index == 0 else "0",
            params=msgspec.structs.replace(request.params, seed=index),
        )
        for index in range(4)
    ]
    answers = run(core_of(BUNDLED_MODEL, max_steps_in_flight=depth, dtype="bfloat16"), several)
    assert all((answers[str(i)].cached_tokens or 0) >= len(request.prompt) - 1 for i in (1, 2, 3))
    for one in several:
        single = run(plain_core(), [msgspec.structs.replace(one, parent_id=None)])
        assert answers[one.id].tokens == single[one.id].tokens


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_batching_modes(batching: str, depth: int) -> None:
    same(
        run(
            core_of(
                BUNDLED_MODEL,
                max_steps_in_flight=depth,
                dtype="bfloat16",
                batching=batching,
                max_seqs=4,
            ),
            requests(),
        )
    )
