"""Bit-identical results of families with their own attention, on the full engine: batched, chunked, cached, resumed."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from argosy.engine.engine_config import SpeculativeConfig
from argosy.engine.engine_request import EngineRequest
from argosy.engine.scheduling import KvCacheGroups
from argosy.engine.serving.engine_core.core import EngineCore
from argosy.protocol import ReasoningBlock, SamplingParams
from tests.engine.core_driver import RequestOutput, create_core, run_requests
from tests.engine.draft_head_reference import MTP_CASES, make_eagle_head, make_mtp_head
from tests.engine.generic_cases import GENERIC_FAMILIES, GENERIC_MODELS
from tests.engine.test_equivalence import DTYPES, create_requests, format_options
from tests.engine.test_families import FAMILIES, MODELS
from tests.engine.test_speculation import ScriptedDrafter
from tests.engine.transformers_reference import VOCAB, make_reference

DEFAULT_MODELS = {(name, "bfloat16") for name in ("gpt-oss", "gemma 3", "deepseek 3", "qwen 3.5")}
FORMATS = [*DTYPES, "float32 KV int8"]
KINDS = ("right", "mixed", "rubbish")
ALL_METHODS = "prediction,prompt_lookup,domain_window"
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {5: 2.0, 90: -100.0}, "banned_token_ids": (6, 7)},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.0, "allowed_token_ids": [*range(20, 60)], "presence_penalty": 1.0},
    {"temperature": 0.7, "reasoning": ReasoningBlock(end_ids=(60, 62), budget=7)},
    {"temperature": 0.0, "frequency_penalty": 1.0},
]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id="-".join(case), marks=marks)
        for case in product(FAMILIES | GENERIC_FAMILIES, FORMATS)
        for marks in [() if case in DEFAULT_MODELS else pytest.mark.exhaustive]
    ],
)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    name, dtype = request.param
    family, options = (FAMILIES | GENERIC_FAMILIES)[name]
    path = tmp_path_factory.mktemp("model")
    return make_reference(
        path, family, options, model=(MODELS | GENERIC_MODELS).get(family, "")
    ).path, dtype


@cache
def requests() -> list[EngineRequest]:
    """Return requests with prompts of many lengths, half of them greedy."""
    params = [
        SamplingParams(**fields, seed=seed, max_tokens=24, ignore_eos=True, logprobs=1)
        for seed, fields in enumerate(PARAMS)
    ]
    return create_requests(params, range(3, VOCAB))


def run(
    model: tuple[Path, str],
    *,
    twice: bool = False,
    **options: object,
) -> tuple[dict[str, RequestOutput], EngineCore]:
    path, dtype = model
    core = create_core(
        path, **format_options(dtype) | {"max_seqs": 8, "task": "generate"} | options
    )
    if "num_blocks" in options:
        core.scheduler.output_estimator.fraction = 0.0  # so that sequences are preempted
    outputs = run_requests(core, requests())
    return run_requests(core, requests()) if twice else outputs, core


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
    cached, core = run(model, twice=True)
    assert sum(output.cached_tokens or 0 for output in cached.values()) > 100
    check(cached)
    groups = KvCacheGroups(core.scheduler.limits.kv_windows, core.info.block_size)
    preempted, core = run(model, num_blocks=groups.count_blocks(12 * core.info.block_size))
    # With windows alone no two of these sequences fit, so that none grows at the expense of another one.
    assert core.scheduler.preemptions > 0 or None not in core.scheduler.limits.kv_windows
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


@pytest.mark.usefixtures("all_drafts")
def test_drafts_change_no_output(model: tuple[Path, str]) -> None:
    """Scripted drafts, right and wrong, and those of the own drafters, with preemptions and after a resume."""
    expected, plain = run(model, max_seqs=1, prefix_cache=False)
    outputs = {key: output.tokens for key, output in expected.items()}
    options: dict[str, Any] = {
        "warmup": True,
        "max_step_tokens": 64,
        "max_seqs": 5,
        "speculation": ALL_METHODS,
    }
    num_blocks = KvCacheGroups(plain.scheduler.limits.kv_windows, 16).count_blocks(20 * 16)
    _, core = run(model, num_blocks=num_blocks, **options)
    assert (core.speculation is None) == (core.scheduler.limits.state_snapshots is not None)
    assert ("recurrent states" in core.info.no_drafts_reason) == (core.speculation is None)
    if core.speculation is None:
        return
    predicted = [
        msgspec.structs.replace(
            request, prediction=[*outputs[request.id][2:], 9], resumed_tokens=resumed
        )
        for request in requests()
        for resumed in [outputs[request.id][:9] if int(request.id) % 3 == 0 else []]
    ]
    vocab_size, all_drafters = core.info.vocab_size, [core.speculation.drafters]
    all_drafters += [[ScriptedDrafter(kind, outputs, vocab_size)] for kind in KINDS]
    for drafters in all_drafters:
        core.speculation.drafters = drafters
        accepted = core.speculation.stats.accepted_tokens.total()
        for key, output in run_requests(core, predicted).items():
            skipped = 9 if int(key) % 3 == 0 else 0
            assert output.tokens == outputs[key][skipped:]
            assert output.logprobs == expected[key].logprobs[skipped:]
            assert output.finish == expected[key].finish
        assert core.speculation.stats.accepted_tokens.total() > accepted


@pytest.fixture(scope="module")
def eagle_head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random head, which reads the same states of any model: those before its first and last two layers."""
    return str(make_eagle_head(tmp_path_factory.mktemp("heads"), layers=(1, 1, 2)).head)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_draft_model_changes_no_output(
    model: tuple[Path, str], method: str, eagle_head: str
) -> None:
    """The model drafts for itself, or a head for it, beside prompt lookup, with prefix hits and preemptions."""
    expected, plain = run(model, max_seqs=1, prefix_cache=False)
    if plain.scheduler.limits.state_snapshots is not None:
        return
    windows = plain.scheduler.limits.kv_windows
    num_blocks = KvCacheGroups(windows, 16).count_blocks(20 * 16)
    draft_model = eagle_head if method == "eagle3" else str(model[0])
    options: dict[str, Any] = {"warmup": True, "max_seqs": 5, "draft_model": draft_model}
    if None not in windows:
        with pytest.raises(ValueError, match="no layer attends to all tokens"):
            run(model, **options)
        return
    if " transformers " in str(plain.info.arithmetic) and method == "eagle3":
        with pytest.raises(
            ValueError, match="cannot draft for a model on a GPU or of transformers"
        ):
            run(model, **options)
        return
    outputs, core = run(model, twice=True, num_blocks=num_blocks, **options)
    assert core.speculation is not None
    assert core.speculation.stats.draft_tokens[method] > 0
    if method == "draft_model":
        assert core.speculation.stats.accepted_tokens[method] > 0
    for key, output in outputs.items():
        assert (output.tokens, output.logprobs) == (expected[key].tokens, expected[key].logprobs)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("layout", ["deepseek 3", "mimo"])
def test_heads_of_checkpoints_change_no_output(layout: str, dtype: str, tmp_path: Path) -> None:
    model = make_mtp_head(tmp_path, MTP_CASES[layout]).target, dtype
    expected, _ = run(model, max_seqs=1, prefix_cache=False)
    config = SpeculativeConfig(method="mtp")
    outputs, core = run(model, twice=True, warmup=True, num_blocks=20, speculative_config=config)
    assert core.speculation is not None
    assert core.speculation.stats.draft_tokens["mtp"] > 0
    for key, output in outputs.items():
        assert (output.tokens, output.logprobs) == (expected[key].tokens, expected[key].logprobs)
