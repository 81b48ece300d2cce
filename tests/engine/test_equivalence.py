"""Bit-identical results: batching, chunking, caching, preemption and resumption do not change a request's output."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from functools import cache

import msgspec
import pytest
from _pytest.mark.structures import ParameterSet

from argosy.constraints import read_tools
from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.kernels.cpu.isa import TORCH_ISA_NAME
from argosy.engine.serving.engine_core.core import EngineCore
from argosy.engine.serving.output_parsing import FORMATS, build_output_grammar
from argosy.models import BUNDLED_MODEL
from argosy.protocol import ReasoningBlock, SamplingParams
from tests.engine.core_driver import RequestOutput, create_core, run_requests
from tests.engine.isas import ISAS
from tests.engine.pairwise import pairwise

DEFAULT_STEPS = None
"""The number of steps in flight that the device selects."""
DEFAULT_ISA = "default"
"""The instruction set that the engine selects itself."""
INT8_KV = "bfloat16 KV int8"
DTYPES = ["bfloat16", "float32", "int8", "int4", INT8_KV]
"""Formats of the weights, and of the KV cache if it is not in the model's dtype."""
PERSON_GRAMMAR = json.dumps(
    {
        "grammars": [
            {
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "maxLength": 12},
                        "age": {"type": "integer", "minimum": 0, "maximum": 150},
                        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
                    },
                    "required": ["name", "age", "tags"],
                    "additionalProperties": False,
                    "x-guidance": {"whitespace_flexible": False},
                }
            }
        ]
    }
)
TEXT_GRAMMAR = json.dumps({"grammars": [{"lark_grammar": "start: /[a-z ]{4,60}/"}]})
MARKERS = {"<tool_call>": 4098, "</tool_call>": 4099}
"""Special tokens of the bundled model around a call."""
TOOL = {
    "name": "find",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CALL_GRAMMAR = build_output_grammar(
    FORMATS["hermes"],
    read_tools({"tools": [{"type": "function", "function": TOOL}]}),
    None,
    MARKERS.get,
).text
"""Free text, in which a call may begin at any token."""
SAMPLING_PARAMS = [
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
    SamplingParams(seed=5, max_tokens=40, grammar=PERSON_GRAMMAR, logprobs=1, min_tokens=12),
    SamplingParams(  # the prompt has opened a reasoning block, and the budget closes it
        seed=6,
        max_tokens=30,
        grammar=PERSON_GRAMMAR,
        reasoning=ReasoningBlock(end_ids=(60, 47, 62), budget=5),
        repetition_penalty=1.2,
        presence_penalty=0.3,
        logprobs=0,
    ),
    SamplingParams(
        temperature=0.9,
        seed=7,
        max_tokens=24,
        grammar=TEXT_GRAMMAR,
        reasoning=ReasoningBlock(end_ids=(71,), start_ids=(70, 72), budget=4),
        logit_bias={70: 50.0, 72: 50.0},
        banned_token_ids=tuple(range(300, 600)),
        stop_token_ids=(90,),
    ),
    SamplingParams(
        seed=8,
        max_tokens=40,
        grammar=CALL_GRAMMAR,
        logit_bias={MARKERS["<tool_call>"]: 8.0},
        logprobs=1,
        min_tokens=9,
    ),
    SamplingParams(
        temperature=0.0,
        max_tokens=16,
        ignore_eos=True,
        reasoning=ReasoningBlock(end_ids=(60, 62), budget=7),
        banned_token_ids=(100, 101),
    ),
]


def create(steps_in_flight: int | None, dtype: str = "bfloat16", **options: object) -> EngineCore:
    """Create a core of the bundled model in one of the `DTYPES`."""
    options = {"max_steps_in_flight": steps_in_flight} | format_options(dtype) | options
    return create_core(BUNDLED_MODEL, **options)


def format_options(dtype: str) -> dict[str, object]:
    """Return the options of a core in one of the `DTYPES`."""
    weights, _, kv_dtype = dtype.partition(" KV ")
    options: dict[str, object] = {"kv_dtype": kv_dtype or "auto", "dtype": weights}
    return options | ({"dtype": "bfloat16", "quantize": weights} if weights[0] == "i" else {})


@cache
def shared_core(dtype: str = "bfloat16", isa: str = DEFAULT_ISA) -> EngineCore:
    """Return one core for each dtype and instruction set. The running test has selected the instruction set."""
    return create(DEFAULT_STEPS, dtype, prefix_cache=False)


def create_requests(all_params: list[SamplingParams], tokens: range) -> list[EngineRequest]:
    """Create requests with prompts of many lengths, some with a shared prefix."""
    rng = random.Random(5)
    shared = rng.choices(tokens, k=40)
    return [
        EngineRequest(
            id=str(number),
            prompt=shared[: rng.choice([0, 0, 33, 40])] + rng.choices(tokens, k=rng.randint(1, 60)),
            params=params,
        )
        for number, params in enumerate(all_params)
    ]


@cache
def requests() -> list[EngineRequest]:
    return create_requests([*SAMPLING_PARAMS, *SAMPLING_PARAMS[:3]], range(5, 4000))


@cache
def reference_output(number: int, dtype: str = "bfloat16", isa: str = DEFAULT_ISA) -> RequestOutput:
    """Run a request alone, with its prompt in one chunk."""
    (output,) = run_requests(shared_core(dtype, isa), [requests()[number]]).values()
    return output


def alternate(values: Iterable[object]) -> list[ParameterSet]:
    """Combine values with 0 and 1 steps in flight. The default tier runs each value with one of them, alternating."""
    return [
        pytest.param(value, steps, id=f"{value}-inflight{steps}", marks=marks)
        for index, value in enumerate(values)
        for steps in (0, 1)
        for marks in [() if steps == index % 2 else pytest.mark.exhaustive]
    ]


@pytest.fixture(
    params=[pytest.param(0, marks=pytest.mark.exhaustive), 1], ids=lambda steps: f"inflight{steps}"
)
def steps_in_flight(request: pytest.FixtureRequest) -> int:
    """Maximum number of steps in flight while the next one is planned."""
    steps: int = request.param
    return steps


def assert_equal_to_reference(
    outputs: dict[str, RequestOutput], dtype: str = "bfloat16", isa: str = DEFAULT_ISA
) -> None:
    for request_id, output in outputs.items():
        expected = reference_output(int(request_id), dtype, isa)
        assert output.tokens == expected.tokens, f"request {request_id}"
        assert output.logprobs == expected.logprobs
        assert output.prompt_logprobs == expected.prompt_logprobs
        assert output.finish == expected.finish


@pytest.mark.parametrize(
    ("dtype", "steps_in_flight"), alternate(DTYPES), indirect=["steps_in_flight"]
)
def test_batched_requests_equal_reference(dtype: str, steps_in_flight: int) -> None:
    core = create(steps_in_flight, dtype, prefix_cache=False)
    assert_equal_to_reference(run_requests(core, requests()), dtype)


@pairwise(
    budget=[
        pytest.param(8, marks=pytest.mark.exhaustive),  # 17 cuts the same prompts, with fewer steps
        17,
        64,
    ],
    dtype=DTYPES,
    steps_in_flight=[0, 1],
    indirect=["steps_in_flight"],
)
def test_chunked_prompts_equal_reference(budget: int, dtype: str, steps_in_flight: int) -> None:
    core = create(steps_in_flight, dtype, max_step_tokens=budget, max_seqs=5)
    assert_equal_to_reference(run_requests(core, requests()), dtype)


@pytest.mark.parametrize("isa", ISAS[1:], indirect=True)
def test_every_isa_equals_its_reference(isa: str) -> None:
    """Decodes run beside decodes and beside prompt chunks. The fastest instruction set runs in all other tests."""
    # torch's operations take seconds for each request, and have the same code for all batch sizes
    selected = requests()[:: 4 if isa == TORCH_ISA_NAME else 2]
    core = create(DEFAULT_STEPS, max_step_tokens=17, max_seqs=5)
    assert_equal_to_reference(run_requests(core, selected), isa=isa)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", INT8_KV, pytest.param("int4", marks=pytest.mark.exhaustive)]
)
def test_prefix_cache_hits_equal_reference(dtype: str, steps_in_flight: int) -> None:
    core = create(steps_in_flight, dtype)
    run_requests(core, requests())
    second_run = run_requests(core, requests())
    assert sum(output.cached_tokens or 0 for output in second_run.values()) > 100
    assert_equal_to_reference(second_run, dtype)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", INT8_KV, pytest.param("int8", marks=pytest.mark.exhaustive)]
)
def test_preempted_requests_equal_reference(dtype: str, steps_in_flight: int) -> None:
    core = create(steps_in_flight, dtype, num_blocks=9, max_seqs=8)
    core.scheduler.output_estimator.fraction = 0.0
    assert_equal_to_reference(run_requests(core, requests()), dtype)
    assert core.scheduler.preemptions > 0


def test_requests_deferred_for_premium_prompt_equal_reference(steps_in_flight: int) -> None:
    """A premium request arrives while others decode. Its prompt is computed in a step of its own."""
    premium, *others = requests()
    core = create(steps_in_flight)
    outputs = {request.id: RequestOutput() for request in requests()}
    deferred = False
    for request in others:
        core.add(request)
    for number in range(100):
        if number == 3:
            core.add(msgspec.structs.replace(premium, tier=0))
        step = core.step()
        for delta in step.deltas:
            outputs[delta.id].add(delta)
        several = step.stats.running > 2
        deferred |= several and [delta.id for delta in step.deltas] == [premium.id]
    assert deferred
    assert_equal_to_reference(outputs)


@pytest.mark.parametrize("dtype", ["bfloat16", INT8_KV])
def test_host_cache_hits_equal_reference_and_corrupt_blocks_are_recomputed(
    dtype: str, steps_in_flight: int
) -> None:
    core = create(steps_in_flight, dtype, num_blocks=11, max_seqs=3, host_kv_bytes=1 << 24)
    run_requests(core, requests())
    assert_equal_to_reference(run_requests(core, requests()), dtype)
    assert core.scheduler.kv_cache.host_hit_tokens > 0
    assert core.scheduler.kv_cache.corrupt_blocks == 0
    core.executor.host_store.data[:, 7] ^= 1
    assert_equal_to_reference(run_requests(core, requests()), dtype)
    assert core.scheduler.kv_cache.corrupt_blocks > 0


@pytest.mark.parametrize(
    ("number", "steps_in_flight"),
    alternate(range(len(SAMPLING_PARAMS))),
    indirect=["steps_in_flight"],
)
def test_resume_at_every_token_continues_output(number: int, steps_in_flight: int) -> None:
    dtype = DTYPES[number % len(DTYPES)]
    request, reference = requests()[number], reference_output(number, dtype)
    resumed = [
        msgspec.structs.replace(request, id=str(index), resumed_tokens=reference.tokens[:index])
        for index in range(1, len(reference.tokens))
    ]
    core = create(steps_in_flight, dtype)
    for request_id, output in run_requests(core, resumed).items():
        index = int(request_id)
        assert output.tokens == reference.tokens[index:]
        assert output.logprobs == reference.logprobs[index:]
        assert output.finish == reference.finish


@pytest.mark.parametrize("number", [1, 8], ids=["unconstrained", "constrained"])
def test_siblings_share_prompt_and_equal_reference(number: int, steps_in_flight: int) -> None:
    """With `n` choices, siblings reuse the first choice's prompt, and each equals a request alone."""
    request = requests()[number]
    siblings = [
        msgspec.structs.replace(
            request,
            id=str(index),
            parent_id=None if index == 0 else "0",
            params=msgspec.structs.replace(request.params, seed=index),
        )
        for index in range(4)
    ]
    outputs = run_requests(create(steps_in_flight), siblings)
    assert all((outputs[str(i)].cached_tokens or 0) >= len(request.prompt) - 1 for i in (1, 2, 3))
    for sibling in siblings:
        single = run_requests(shared_core(), [msgspec.structs.replace(sibling, parent_id=None)])
        assert outputs[sibling.id].tokens == single[sibling.id].tokens


@pytest.mark.parametrize(("block_size", "is_same"), [(32, True), (8, False), (3, False)])
def test_block_sizes_with_other_sums_have_another_arithmetic(
    block_size: int, is_same: bool
) -> None:
    core = create(DEFAULT_STEPS, block_size=block_size)
    assert (core.info.arithmetic == shared_core().info.arithmetic) == is_same
    if is_same:
        assert_equal_to_reference(run_requests(core, requests()))


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_batching_modes_equal_reference(batching: str, steps_in_flight: int) -> None:
    core = create(steps_in_flight, batching=batching, max_seqs=4)
    assert_equal_to_reference(run_requests(core, requests()))
