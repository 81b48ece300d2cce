"""The engine on a GPU device: overlapped, from graphs or not, every request gives its own tokens."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from argosy.engine.execution import executor_loader
from argosy.engine.execution.gpu import memory_profile
from argosy.engine.execution.gpu.cuda_runtime import create_cuda_device
from argosy.engine.execution.gpu.device import GpuDevice
from argosy.engine.serving.core_messages import EngineRequest
from argosy.models import BUNDLED_MODEL
from argosy.protocol import SamplingParams
from tests.engine.core_driver import Answer, core_of, run
from tests.engine.gpu.device import INTERPRETED
from tests.engine.gpu.host_runtime import HostRuntime
from tests.engine.transformers_reference import make_reference

if TYPE_CHECKING:
    from pathlib import Path

    from argosy.engine.serving.engine_core.core import EngineCore

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the fake GPU is for where there is none")

VOCAB = 60
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
"""Every matrix is one tile: an interpreter is slow."""
FORMATS = {"bfloat16": {}, "float8": {"quantize": "fp8", "kv_dtype": "fp8"}}


@pytest.fixture(scope="module", name="model")
def a_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_reference(path, "Llama", SMALL)
    return path


@pytest.fixture(name="runtime")
def a_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HostRuntime:
    """What `build` takes for a GPU, with an empty cache of memory plans."""
    runtime = HostRuntime()
    monkeypatch.setattr(executor_loader, "choose_device", lambda _config: GpuDevice(runtime))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return runtime


def requests() -> list[EngineRequest]:
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB) for _ in range(18)]
    several = [
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=1.0, seed=7, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.8, seed=1, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=0, ignore_eos=True),
    ]
    return [
        EngineRequest(
            id=str(number),
            prompt=shared[: 18 * (number % 2)]
            + [rng.randrange(3, VOCAB) for _ in range(number + 2)],
            params=params,
        )
        for number, params in enumerate(several)
    ]


def core_on(model: Path, **options: object) -> EngineCore:
    settings = {"device": "cuda", "num_blocks": 32, "max_seqs": 4, "max_step_tokens": 64}
    return core_of(model, **(settings | options))


def prepared(core: EngineCore) -> EngineCore:
    """The core with all its graphs, which it makes while there is nothing else to do."""
    while core.has_work:
        assert core.step().deltas == []
    return core


def alone(model: Path, **options: object) -> dict[str, Answer]:
    """The reference: one after the other, one step at a time, without graphs (these never get idle)."""
    found: dict[str, Answer] = {}
    for request in requests():
        core = core_on(model, max_steps_in_flight=0, prefix_cache=False, **options)
        core.add(request)
        answer = found[request.id] = Answer()
        while core.scheduler.has_work:
            for delta in core.step().deltas:
                answer.take(delta)
    return found


def same(answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    for name, answer in expected.items():
        assert answers[name].tokens == answer.tokens, f"request {name}"
        assert answers[name].logprobs == answer.logprobs
        assert answers[name].prompt_logprobs == answer.prompt_logprobs


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_tokens_are_the_same_however_they_are_computed(
    model: Path, runtime: HostRuntime, options: dict[str, object]
) -> None:
    expected = alone(model, **options)
    assert not any(graph.replays for graph in runtime.graphs)
    core = prepared(core_on(model, **options))
    assert [graph.size for graph in runtime.graphs] == [4, 2, 1], "the largest comes first"
    same(run(core, requests()), expected)
    assert sum(graph.replays for graph in runtime.graphs) > 3
    again = run(core, requests())
    assert sum(answer.cached_tokens or 0 for answer in again.values()) > 0
    same(again, expected)
    if options:
        return
    same(run(core_on(model, max_step_tokens=7, **options), requests()), expected)
    tight = core_on(model, block_size=4, num_blocks=9, **options)
    tight.scheduler.output_estimator.fraction = 0.0
    same(run(tight, requests()), expected)
    assert tight.scheduler.preemptions > 0


def test_a_graph_that_cannot_be_made_is_done_without(model: Path, runtime: HostRuntime) -> None:
    def refuse(_work: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    runtime.capture = refuse  # type: ignore[method-assign, assignment]
    core = prepared(core_on(model))
    answer = run(core, requests()[:1])["0"]
    assert len(answer.tokens) == 6


def test_memory_is_measured_once_for_each_model_and_setting(
    model: Path, runtime: HostRuntime, tmp_path: Path
) -> None:
    for _ in range(2):
        core_on(model, num_blocks=None, kv_memory_bytes=1 << 20)
    assert runtime.profiled == 1
    core_on(model, max_step_tokens=32)
    assert runtime.profiled == 2
    (first, *_) = sorted((tmp_path / "argosy" / "memory").iterdir())
    for damage in (b"", b"{}", b'{"key": "another", "working_bytes": 1}'):
        for path in first.parent.iterdir():
            path.write_bytes(damage)
        core_on(model, max_step_tokens=32)
    assert runtime.profiled == 5


def test_the_kv_cache_takes_what_weights_and_the_largest_step_leave(
    model: Path, runtime: HostRuntime
) -> None:
    core = core_on(model, num_blocks=None, max_seqs=2)
    most_useful = core.scheduler.limits.num_blocks
    runtime.free = (512 << 20) + (1 << 20) + most_useful * 512  # margin, step, half of it
    core = core_on(model, num_blocks=None, max_seqs=2)
    assert 0 < core.scheduler.limits.num_blocks < most_useful
    runtime.free = 1 << 20
    with pytest.raises(ValueError, match="no memory for one KV block"):
        core_on(model, num_blocks=None, max_seqs=2)


def test_plans_that_no_disk_takes_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "argosy").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory_profile.write_memory_profile("key", 5)
    assert memory_profile.read_memory_profile("key") is None


def test_what_a_device_cannot_do_is_refused_with_the_remedy(
    model: Path, runtime: HostRuntime
) -> None:
    with pytest.raises(ValueError, match="set quantize to fp8"):
        core_on(model, quantize="int8")
    runtime.compute_capability = (8, 0)
    with pytest.raises(ValueError, match="leave quantize fp8 out"):
        core_on(model, quantize="fp8")
    with pytest.raises(ValueError, match="leave kv_dtype fp8 out"):
        core_on(model, kv_dtype="fp8")


def test_where_there_is_no_gpu_the_settings_say_so() -> None:
    with pytest.raises(ValueError, match="set device to cpu"):
        create_cuda_device()
    with pytest.raises(ValueError, match="set device to cpu"):
        core_of(BUNDLED_MODEL, device="cuda")
    with pytest.raises(ValueError, match="leave kv_dtype at auto"):
        core_of(BUNDLED_MODEL, device="cpu", kv_dtype="fp8")
