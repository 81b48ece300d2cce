"""Bit-identical results of families with their own attention, on the full engine: batched, chunked, cached, resumed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
import pytest

from argosy.engine.engine_request import EngineRequest
from argosy.engine.scheduling import KvCacheGroups
from argosy.engine.serving.engine_core.core import EngineCore
from argosy.protocol import SamplingParams
from tests.engine.core_driver import RequestOutput, create_core, run_requests
from tests.engine.generic_cases import GENERIC_FAMILIES
from tests.engine.test_equivalence import INT8_KV, create_requests, format_options
from tests.engine.test_families import FAMILIES, MODELS
from tests.engine.test_speculation import ScriptedDrafter
from tests.engine.transformers_reference import VOCAB, make_reference


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, dtype), id=f"{name}-{dtype}", marks=marks)
        for name, dtype, marks in (
            ("gpt-oss", "bfloat16", ()),
            ("gpt-oss", "int8", pytest.mark.exhaustive),
            ("gpt-oss", INT8_KV, pytest.mark.exhaustive),
            ("gemma 3", "bfloat16", ()),
            ("gemma 3", INT8_KV, pytest.mark.exhaustive),
            ("olmo 3", "bfloat16", pytest.mark.exhaustive),
            ("deepseek 3", "bfloat16", ()),
            ("deepseek 3", "float32", pytest.mark.exhaustive),
            ("deepseek 3", INT8_KV, pytest.mark.exhaustive),
            ("deepseek 2 lite", "int4", pytest.mark.exhaustive),
            ("qwen 3.5", "bfloat16", ()),
            ("qwen 3 next", "float32", pytest.mark.exhaustive),
            ("qwen 3 next", "float32 KV int8", pytest.mark.exhaustive),
            ("qwen 3.5 moe", "int8", pytest.mark.exhaustive),
        )
    ],
)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    name, dtype = request.param
    family, options = (FAMILIES | GENERIC_FAMILIES)[name]
    path = tmp_path_factory.mktemp("model")
    return make_reference(path, family, options, model=MODELS.get(family, "")).path, dtype


@cache
def requests() -> list[EngineRequest]:
    """Return requests with prompts of many lengths, half of them greedy."""
    params = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True, logprobs=1
        )
        for seed, temperature in enumerate([0.9, 0.0] * 4)
    ]
    return create_requests(params, range(3, VOCAB))


def run(
    model: tuple[Path, str],
    *,
    twice: bool = False,
    drafts: dict[str, list[int]] | None = None,
    **options: object,
) -> tuple[dict[str, RequestOutput], EngineCore]:
    path, dtype = model
    core = create_core(path, **format_options(dtype) | {"max_seqs": 8} | options)
    if drafts is not None:
        assert (core.speculation is None) == (core.scheduler.limits.state_snapshots is not None)
        if core.speculation is not None:
            core.speculation.drafters = [ScriptedDrafter("mixed", drafts, core.info.vocab_size)]
    if "num_blocks" in options:
        core.scheduler.output_estimator.fraction = 0.0  # so that sequences are preempted
    outputs = run_requests(core, requests())
    return run_requests(core, requests()) if twice else outputs, core


@pytest.mark.usefixtures("all_drafts")
def test_outputs_do_not_depend_on_scheduling(model: tuple[Path, str]) -> None:
    single, _ = run(model, max_seqs=1, prefix_cache=False)
    expected = {key: (output.tokens, output.logprobs) for key, output in single.items()}
    assert len({token for tokens, _ in expected.values() for token in tokens}) > 20

    def check(outputs: dict[str, RequestOutput], skipped: int = 0) -> None:
        for key, output in outputs.items():
            tokens, logprobs = expected[key]
            assert (output.tokens, output.logprobs) == (tokens[skipped:], logprobs[skipped:])

    check(run(model, prefix_cache=False)[0])
    check(run(model, max_step_tokens=17, max_steps_in_flight=1)[0])
    drafts = {key: tokens for key, (tokens, _) in expected.items()}
    check(run(model, drafts=drafts, warmup=True, max_step_tokens=64, max_seqs=5)[0])
    cached, core = run(model, twice=True)
    assert sum(output.cached_tokens or 0 for output in cached.values()) > 100
    check(cached)
    groups = KvCacheGroups(core.scheduler.limits.kv_windows, core.info.block_size)
    preempted, core = run(model, num_blocks=groups.count_blocks(12 * core.info.block_size))
    assert core.scheduler.preemptions > 0
    check(preempted)
    resumed = [
        msgspec.structs.replace(request, resumed_tokens=expected[request.id][0][:9])
        for request in requests()
    ]
    check(run_requests(core, resumed), skipped=9)
    siblings = [
        msgspec.structs.replace(requests()[0], id=str(number), parent_id="0" if number else None)
        for number in range(3)
    ]
    for output in run_requests(core, siblings).values():
        assert (output.tokens, output.logprobs) == expected["0"]
