"""Sleep of a model: what it frees, and that a model that has woken up gives the same bytes."""

from __future__ import annotations

import gc
import json
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np
import pytest

from argosy.engine.engine_request import EngineRequest
from argosy.engine.serving.engine_core.core import EngineCore
from argosy.models import BUNDLED_MODEL, DRAFT_MODEL
from argosy.process import private_memory_bytes, return_free_memory
from argosy.protocol import SamplingParams
from tests.engine.core_driver import create_core, run_requests
from tests.engine.test_equivalence import (
    INT8_KV,
    assert_equal_to_reference,
    create,
    create_requests,
    reference_output,
    requests,
)
from tests.engine.test_families import FAMILIES, MODELS
from tests.engine.transformers_reference import make_reference
from tests.support.waiting import wait_for

HOST_BYTES = 1 << 24
PREFAULTED_BYTES = 100 << 20


@pytest.mark.parametrize("steps_in_flight", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_outputs_are_equal_and_hits_survive_a_sleep_of_any_level(steps_in_flight: int) -> None:
    core = create(steps_in_flight, warmup=True, host_kv_bytes=HOST_BYTES)
    run_requests(core, requests())
    for path in ([1, 0], [2, 0], [1, 2, 1, 0]):
        for level in path:
            assert core.set_sleep_level(level).level == level
        hits = core.scheduler.kv_cache.host_hit_tokens
        assert_equal_to_reference(run_requests(core, requests()))
        assert core.scheduler.kv_cache.host_hit_tokens > hits
    assert core.scheduler.kv_cache.corrupt_blocks == 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_seqs": 1}, id="alone", marks=pytest.mark.exhaustive),
        pytest.param({"num_blocks": 9, "max_seqs": 8, "max_step_tokens": 17}, id="preempted"),
    ],
)
def test_woken_model_with_an_int8_cache_gives_the_same_bytes(options: dict[str, object]) -> None:
    """Also for streams that began at an engine that never slept, as after a failover."""
    batch = requests()[:6]
    core = create(1, INT8_KV, host_kv_bytes=HOST_BYTES, **options)
    core.scheduler.output_estimator.fraction = 0.0
    run_requests(core, batch[:1])
    core.set_sleep_level(2)
    core.set_sleep_level(0)
    assert_equal_to_reference(run_requests(core, batch), INT8_KV)
    assert (core.scheduler.preemptions > 0) == ("num_blocks" in options)
    resumed = [
        msgspec.structs.replace(
            request, resumed_tokens=reference_output(int(request.id), INT8_KV).tokens[:5]
        )
        for request in batch
    ]
    for request_id, output in run_requests(core, resumed).items():
        expected = reference_output(int(request_id), INT8_KV)
        assert output.tokens == expected.tokens[5:]
        assert output.logprobs == expected.logprobs[5:]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma 3", {}),
        ("qwen 3.5", {}),
        ("deepseek 3", {"quantize": "int8"}),
        ("", {"draft_model": str(DRAFT_MODEL)}),
    ],
)
def test_models_of_all_kinds_wake_up(
    family: str, options: dict[str, object], tmp_path: Path
) -> None:
    """Windows, recurrent states, experts with latent attention, and the bundled model with a draft model."""
    path = BUNDLED_MODEL
    if family:
        name, settings = FAMILIES[family]
        path = make_reference(tmp_path, name, settings, model=MODELS.get(name, "")).path
    core = create_core(path, warmup=True, host_kv_bytes=HOST_BYTES, **options)
    batch = create_requests(
        [SamplingParams(temperature=t, seed=1, max_tokens=12, logprobs=1) for t in (0.0, 0.9)],
        range(5, 60),
    )
    before = run_requests(core, batch)
    for level in (1, 2):
        core.set_sleep_level(level)
        core.set_sleep_level(0)
        after = run_requests(core, batch)
        assert [each.tokens for each in after.values()] == [each.tokens for each in before.values()]
        assert [each.logprobs for each in after.values()] == [
            each.logprobs for each in before.values()
        ]


def measure_sleeps() -> list[int]:
    """Return the private memory before the load, and in turn with a full KV cache and asleep, in a new process."""
    core: EngineCore | None = None

    def measure() -> int:
        gc.collect()
        return_free_memory()
        return private_memory_bytes()

    def fill() -> int:
        """Give blocks to a long prompt, which prefaults the memory of most of the KV cache in the background."""
        assert core is not None
        core.add(EngineRequest(id="0", prompt=[5] * 8000, params=SamplingParams(max_tokens=1)))
        core.step()
        core.abort(["0"])
        while core.has_work:
            core.step()
        wait_for(lambda: measure() - sizes[0] > PREFAULTED_BYTES)
        return measure()

    create(0).set_sleep_level(1)  # what only the first model of a process allocates
    sizes = [measure()]
    core = create(0, warmup=True, num_blocks=3072)
    sizes.append(fill())
    for level in (1, 2):
        core.set_sleep_level(level)
        sizes.append(measure())
        core.set_sleep_level(0)
        sizes.append(fill())
    return sizes


def test_sleep_returns_the_memory_and_waking_takes_as_much_again() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        unloaded, used, *sizes = process.submit(measure_sleeps).result()
    for asleep, woken in zip(sizes[::2], sizes[1::2], strict=True):
        assert used - asleep >= 0.9 * (used - unloaded)
        assert woken == pytest.approx(used, rel=0.05)


def test_model_whose_files_changed_in_its_sleep_does_not_wake_up(tmp_path: Path) -> None:
    path = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    core = create_core(path)
    core.set_sleep_level(1)
    config = path / "config.json"
    config.write_text(config.read_text() + "\n")
    core.set_sleep_level(0)  # its weights are mapped still
    core.set_sleep_level(2)
    with pytest.raises(ValueError, match="were replaced"):
        core.set_sleep_level(0)


def test_model_whose_results_changed_in_its_sleep_does_not_wake_up(tmp_path: Path) -> None:
    """The file is written in place, so that the weights that are mapped from it change, too."""
    path = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    core = create_core(path)
    core.set_sleep_level(1)
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    header_end = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:header_end])["model.embed_tokens.weight"]["data_offsets"]
    embedding = np.frombuffer(data, np.uint16)[(header_end + begin) // 2 : (header_end + end) // 2]
    embedding ^= 1 << 15
    with file.open("r+b") as changed:
        changed.write(data)
    with pytest.raises(RuntimeError, match="differ from those before"):
        core.set_sleep_level(0)
