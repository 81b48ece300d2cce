"""Adapters (LoRA) in the engine core: the same tokens whatever the batch, the cache, the memory and the failures."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from argosy.engine.engine_request import AdapterSource, EngineRequest
from argosy.engine.serving.adapter_files import read_adapter_source
from argosy.engine.serving.engine_core.core import EngineCore
from argosy.models import BUNDLED_MODEL
from argosy.process import private_memory_bytes
from argosy.protocol import SamplingParams
from tests.engine.adapter_files import write_adapter
from tests.engine.core_driver import RequestOutput, create_core, run_requests
from tests.engine.test_speculation import ScriptedDrafter

PARAMS = SamplingParams(temperature=0.7, seed=5, max_tokens=24, ignore_eos=True, logprobs=2)
PROMPT = list(range(100, 150))
JSON_GRAMMAR = r'{"grammars": [{"lark_grammar": "start: /[a-z]{5,30}/"}]}'


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AdapterSource | None]:
    """No adapter, two, one with DoRA, one that is broken, and a copy of the first in another folder."""
    root = tmp_path_factory.mktemp("adapters")
    folders = {
        "a": write_adapter(root / "a", BUNDLED_MODEL, seed=1),
        "b": write_adapter(root / "b", BUNDLED_MODEL, rank=9, seed=2),
        "dora": write_adapter(root / "dora", BUNDLED_MODEL, seed=3, use_dora=True),
        "broken": write_adapter(root / "broken", BUNDLED_MODEL, seed=4, bias="all"),
        "copy of a": write_adapter(root / "copy", BUNDLED_MODEL, seed=1),
    }
    return {"none": None} | {name: read_adapter_source(path) for name, path in folders.items()}


def make_core(**options: object) -> EngineCore:
    return create_core(BUNDLED_MODEL, max_seqs=8, enable_lora=True, **options)


def make_request(name: str, source: AdapterSource | None, **changes: object) -> EngineRequest:
    request = EngineRequest(id=name, prompt=PROMPT, params=PARAMS, adapter=source)
    return msgspec.structs.replace(request, **changes)


@pytest.fixture(scope="module", params=["auto", "int8"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def core(kv_dtype: str) -> Iterator[EngineCore]:
    core = make_core(kv_dtype=kv_dtype)
    yield core
    core.close()


@pytest.fixture(scope="module")
def expected(
    core: EngineCore, sources: dict[str, AdapterSource | None], kv_dtype: str
) -> dict[str, RequestOutput]:
    """Output of each adapter alone, with that of a core without adapters for none."""
    outputs: dict[str, RequestOutput] = {}
    for name in ("a", "b", "dora"):
        core.reset_prefix_cache()
        outputs |= run_requests(core, [make_request(name, sources[name])])
    base = create_core(BUNDLED_MODEL, kv_dtype=kv_dtype)
    outputs |= run_requests(base, [make_request("none", None)])
    assert len({tuple(output.tokens) for output in outputs.values()}) == 4
    return outputs


def assert_equal(output: RequestOutput, expected: RequestOutput) -> None:
    assert (output.finish, output.error) == ("length", None)
    assert output.tokens == expected.tokens
    assert output.logprobs == expected.logprobs


def test_tokens_do_not_depend_on_batch_and_broken_adapter_ends_alone(
    core: EngineCore,
    sources: dict[str, AdapterSource | None],
    expected: dict[str, RequestOutput],
) -> None:
    core.reset_prefix_cache()
    names = ["none", "a", "broken", "dora", "b"]
    requests = [make_request(name, sources[name]) for name in names]
    outputs = run_requests(core, requests)
    for name, output in expected.items():
        assert_equal(outputs[name], output)
    assert outputs["broken"].error_code == "invalid_adapter"
    assert "bias" in (outputs["broken"].error or "")


def test_chunks_of_an_adapters_prompt_run_beside_other_rows(
    sources: dict[str, AdapterSource | None], expected: dict[str, RequestOutput], kv_dtype: str
) -> None:
    """In some steps no row with an adapter has logits."""
    core = make_core(max_step_tokens=16, kv_dtype=kv_dtype)
    outputs = run_requests(core, [make_request(name, sources[name]) for name in ("none", "a")])
    for name, output in outputs.items():
        assert_equal(output, expected[name])
    core.close()


def test_prefix_hits_follow_content_and_keep_tokens(
    core: EngineCore,
    sources: dict[str, AdapterSource | None],
    expected: dict[str, RequestOutput],
) -> None:
    core.reset_prefix_cache()
    for number, (name, hits) in enumerate(
        [("a", 0), ("b", 0), ("none", 0), ("a", 48), ("copy of a", 48), ("none", 48), ("b", 48)]
    ):
        (output,) = run_requests(core, [make_request(str(number), sources[name])]).values()
        assert_equal(output, expected[name.removeprefix("copy of ")])
        assert output.cached_tokens == hits


def test_resumed_and_preempted_requests_keep_tokens(
    sources: dict[str, AdapterSource | None], expected: dict[str, RequestOutput], kv_dtype: str
) -> None:
    core = make_core(num_blocks=13, kv_dtype=kv_dtype)
    core.scheduler.output_estimator.fraction = 0.0  # so that sequences are preempted
    requests = [
        make_request(name, sources[name], resumed_tokens=expected[name].tokens[:resumed])
        for name, resumed in [("a", 7), ("none", 0), ("b", 1), ("dora", 0)]
    ]
    outputs = run_requests(core, requests)
    for request in requests:
        tokens = request.resumed_tokens + outputs[request.id].tokens
        assert tokens == expected[request.id].tokens
    assert core.scheduler.preemptions
    core.close()


@pytest.mark.usefixtures("all_drafts")
def test_drafts_are_verified_with_the_adapter_of_their_row(
    sources: dict[str, AdapterSource | None], expected: dict[str, RequestOutput], kv_dtype: str
) -> None:
    core = make_core(warmup=True, kv_dtype=kv_dtype)
    assert core.speculation is not None
    drafts = {name: output.tokens for name, output in expected.items()}
    core.speculation.drafters = [ScriptedDrafter("mixed", drafts, core.info.vocab_size)]
    requests = [make_request(name, sources[name]) for name in expected]
    outputs = run_requests(core, requests)
    for name, output in expected.items():
        assert_equal(outputs[name], output)
    assert core.speculation.stats.accepted_tokens.total() > 20
    core.close()


def test_evicted_adapters_are_loaded_again(
    sources: dict[str, AdapterSource | None], expected: dict[str, RequestOutput], kv_dtype: str
) -> None:
    largest = max(source.size_bytes for source in sources.values() if source is not None)
    core = make_core(adapter_memory_bytes=largest, kv_dtype=kv_dtype)
    for number, name in enumerate("abab"):
        grammar = JSON_GRAMMAR if number == 1 else ""
        params = msgspec.structs.replace(PARAMS, grammar=grammar)
        request = make_request(name, sources[name], params=params)
        (output,) = run_requests(core, [request]).values()
        if not grammar:
            assert_equal(output, expected[name])
    stats = core.step().stats
    assert (stats.adapter_evictions_total, stats.adapters_resident) == (3, 1)
    assert stats.adapter_loads_total == {"loaded": 4}
    assert stats.adapter_load_bytes_per_s > 0
    core.close()


def test_version_that_replaces_another_in_its_folder_leaves_running_requests_alone(
    tmp_path: Path,
    core: EngineCore,
    sources: dict[str, AdapterSource | None],
    expected: dict[str, RequestOutput],
) -> None:
    core.reset_prefix_cache()
    old = read_adapter_source(write_adapter(tmp_path, BUNDLED_MODEL, seed=1))
    outputs = {name: RequestOutput() for name in ("old", "new", "late")}
    core.add(make_request("old", old))
    while len(outputs["old"].tokens) < 3:
        for delta in core.step().deltas:
            outputs[delta.id].add(delta)
    write_adapter(tmp_path, BUNDLED_MODEL, rank=9, seed=2)
    new = read_adapter_source(tmp_path)
    core.add(make_request("new", new))
    core.unload_adapter(old.digest)
    while core.has_work:
        for delta in core.step().deltas:
            outputs[delta.id].add(delta)
    assert_equal(outputs["old"], expected["a"])
    assert_equal(outputs["new"], expected["b"])
    late = run_requests(core, [make_request("late", old)])["late"]
    assert late.error_code == "invalid_adapter"  # the folder has another version
    assert sources["b"] is not None
    assert new.digest == sources["b"].digest


def test_unloading_returns_private_memory(tmp_path: Path) -> None:
    # In a process of its own: other tests leave a heap in pieces, of which none goes back to the system.
    program = f"from {__name__} import check_memory; check_memory({str(tmp_path)!r})"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=200)


def check_memory(folder: str) -> None:
    """Load and unload an adapter several times. Raises AssertionError if its memory stays."""
    core = make_core()
    source = read_adapter_source(write_adapter(Path(folder), BUNDLED_MODEL, rank=256))
    run_requests(core, [make_request("warm", source)])
    size_bytes = core.step().stats.adapter_bytes
    assert size_bytes > 5e6
    used = []
    for number in range(4):
        gc.collect()
        loaded = private_memory_bytes()
        core.unload_adapter(source.digest)
        used.append(private_memory_bytes())
        assert loaded - used[-1] > 0.9 * size_bytes
        run_requests(core, [make_request(str(number), source)])
    assert used[-1] - used[1] < 0.2 * size_bytes  # no cycle keeps anything
    core.close()


def test_sleep_frees_adapters_and_requests_load_them_again(
    sources: dict[str, AdapterSource | None], expected: dict[str, RequestOutput], kv_dtype: str
) -> None:
    core = make_core(warmup=True, max_model_len=256, kv_dtype=kv_dtype)
    for level in (0, 1, 2):
        if level:
            core.set_sleep_level(level)
            core.unload_adapter("sha256:unknown")
            assert not core.has_work
            core.set_sleep_level(0)
            assert core.step().stats.adapters_resident == 0
        outputs = run_requests(core, [make_request(name, sources[name]) for name in ("a", "dora")])
        assert_equal(outputs["a"], expected["a"])
        assert_equal(outputs["dora"], expected["dora"])
    core.close()


def test_adapters_need_to_be_enabled(sources: dict[str, AdapterSource | None]) -> None:
    core = create_core(BUNDLED_MODEL)
    (output,) = run_requests(core, [make_request("r", sources["a"])]).values()
    assert "--enable-lora" in (output.error or "")
    core.close()
