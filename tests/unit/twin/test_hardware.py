"""The hardware model: shapes, memory, prices of steps, served requests, and accuracy on public measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from benchmarks.twin_accuracy import ROWS, compare, mape, read_rows

from argosy.twin.hardware import (
    CapacityError,
    OfferedRequest,
    ReplicaSpec,
    RooflineCost,
    ServingLimits,
    build_replica,
    fit_memory,
    load_hardware,
    load_shape,
    parse_shape,
    simulate_replica,
)

HARDWARE = load_hardware()
KIB = 1024


def replica(model: str, accelerator: str = "h200_sxm", tensor_parallel: int = 1) -> ReplicaSpec:
    return build_replica(
        HARDWARE,
        load_shape(model),
        accelerator,
        weights="fp8",
        tensor_parallel=tensor_parallel,
    )


@pytest.mark.parametrize(
    ("model", "billions", "active", "kv_kib"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", 70.6, 69.5, 320),
        ("llama-3.1-8b", 8.0, 7.5, 128),
        ("llama-3.1-405b", 405.9, 403.8, 504),
        ("deepseek-r1", 671.0, 36.7, 68.6),
        ("gpt-oss-120b", 116.8, 5.1, 72),
        ("qwen3-235b-a22b", 235.1, 21.6, 188),
        ("qwen3-30b-a3b", 30.5, 3.0, 96),
        ("mixtral-8x7b", 46.7, 12.8, 128),
    ],
)
def test_well_known_models_have_their_published_sizes(
    model: str, billions: float, active: float, kv_kib: float
) -> None:
    shape = load_shape(model)
    assert shape.parameters() / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_parameters() / 1e9 == pytest.approx(active, rel=0.05)
    assert shape.kv_bytes_per_token("bf16") / KIB == pytest.approx(kv_kib, rel=0.01)


def test_every_accelerator_has_sources_and_efficiencies() -> None:
    for name, accelerator in HARDWARE.accelerators.items():
        assert set(accelerator.sources) >= {"memory_gib", "bandwidth_gb_s", "tflops", "watts"}
        for engine in HARDWARE.engines:
            assert HARDWARE.find_kernels(engine, name).gemm["bf16"][0] <= 1


@pytest.mark.parametrize("model", ["llama-3.1-70b", "deepseek-r1", "gpt-oss-120b"])
def test_steps_cost_more_with_more_work_and_never_less_than_the_hardware_allows(model: str) -> None:
    spec = replica(model, tensor_parallel=8)
    cost = RooflineCost(spec)
    decode = [cost.step_seconds(rows, rows * 1000) for rows in (1, 8, 64, 256)]
    assert decode == sorted(decode)
    assert cost.step_seconds(64, 200_000) > cost.step_seconds(64, 100_000)
    assert cost.step_seconds(8, 8000, [(512, 0)]) > cost.step_seconds(8, 8000)
    # Each token of a prompt is multiplied with all active parameters.
    flops = 2 * 4096 * spec.model.active_parameters() * 0.9
    peak = 8 * max(spec.accelerator.tflops.values()) * 1e12
    assert cost.step_seconds(0, 0, [(4096, 0)]) > flops / peak


def test_memory_divides_among_accelerators_and_bounds_the_kv_cache() -> None:
    assert not fit_memory(replica("llama-3.1-405b")).fits
    one, two = (
        fit_memory(replica("llama-3.1-70b")),
        fit_memory(replica("llama-3.1-70b", tensor_parallel=2)),
    )
    assert two.kv_tokens > 2 * one.kv_tokens
    assert two.kv_bytes_per_token == one.kv_bytes_per_token / 2
    # Latent attention is not divided, since every accelerator needs the latent.
    latent = [fit_memory(replica("deepseek-r1", "b200_sxm", size)) for size in (4, 8)]
    assert latent[0].kv_bytes_per_token == latent[1].kv_bytes_per_token


class _EveryStep:
    """A price that the simulation cannot advance in closed form, because each call is counted as one step."""

    def __init__(self) -> None:
        self.tokens = 0

    def step_seconds(
        self,
        decode_rows: int,
        context_tokens: float,
        prefill_chunks: Sequence[tuple[int, int]] = (),
    ) -> float:
        prompt = sum(tokens for tokens, _ in prefill_chunks)
        self.tokens += prompt
        return 0.01 + 1e-5 * prompt + 1e-7 * context_tokens + 1e-4 * decode_rows


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "sglang"])
@pytest.mark.parametrize("kv_tokens", [100_000, 4_000])
def test_all_requests_are_served_within_the_kv_cache(engine: str, kv_tokens: int) -> None:
    profile = msgspec.structs.replace(HARDWARE.engines[engine], request_ms=0.0)
    limits = ServingLimits(kv_tokens=kv_tokens, engine=profile, max_sequences=32)
    requests = [OfferedRequest(0.05 * n, 200 + 37 * n % 500, 1 + 53 * n % 300) for n in range(60)]
    cost = _EveryStep()
    done = simulate_replica(cost, limits, requests)
    assert sorted(each.output_tokens for each in done) == sorted(r.output_tokens for r in requests)
    assert all(each.sent_s < each.first_token_s <= each.last_token_s for each in done)
    prompts = sum(request.prompt_tokens for request in requests)
    assert cost.tokens >= prompts  # more if sequences were preempted and computed again
    if kv_tokens == 100_000 or engine == "trtllm":
        assert cost.tokens == prompts
    ttft = statistics.fmean(each.ttft_s for each in done)
    closed = simulate_replica(_EveryStep(), limits, requests, concurrency=4)
    assert len(closed) == 60
    assert statistics.fmean(each.ttft_s for each in closed) < ttft or kv_tokens == 100_000


def test_one_request_takes_the_sum_of_its_steps() -> None:
    profile = msgspec.structs.replace(HARDWARE.engines["vllm"], request_ms=0.0)
    limits = ServingLimits(kv_tokens=10_000, engine=profile)
    times = simulate_replica(_EveryStep(), limits, [OfferedRequest(0.0, 1000, 101, 400)])[0]
    assert times.ttft_s == pytest.approx(0.01 + 1e-5 * 600)
    assert times.tpot_s == pytest.approx(0.0101 + 1e-7 * (1000 + 99 / 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100_sxm: {dollars_per_hour: {on_demand: -1}}", "nothing has a negative price"),
        ("h100_sxm: {memory_gib: 0}", "give a number above 0"),
        ("h100_sxm: {colour: red}", "colour"),
        ("new: {title: New}", "missing required field"),
        ("[1, 2]", "must map names"),
    ],
)
def test_wrong_hardware_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hardware.yaml"
    path.write_text(text)
    with pytest.raises(CapacityError, match=message):
        load_hardware(path)
    path.write_text("h100_sxm: {dollars_per_hour: {on_demand: 1.5}}")
    changed = load_hardware(path).accelerators["h100_sxm"]
    assert changed.dollars_per_hour == {"on_demand": 1.5, "spot": 1.6}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"hidden_size": 0, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 1},
        {"hidden_size": "8", "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 1},
        {"hidden_size": 10**9, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 1},
    ],
)
def test_a_config_without_sizes_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(CapacityError, match="model: "):
        parse_shape("model", config)


def test_predictions_stay_as_accurate_as_the_documentation_says() -> None:
    """A gate against regressions: a part of the rows of the families with goals."""
    rows = [
        row
        for row in read_rows(ROWS)
        if row["kind"] == "closed_loop" and row.integer("concurrency_or_batch") <= 16
    ]
    dense = compare(HARDWARE, [row for row in rows if row["model"] == "Llama-3.1-70B"][::3])
    assert mape(dense, "tpot")[1] < 7
    assert mape(dense, "ttft")[2] < 16
    experts = [row for row in rows if row["model"].startswith(("gpt-oss", "DeepSeek"))]
    assert mape(compare(HARDWARE, experts[::4]), "tpot")[1] < 18
    measured = read_rows(ROWS)
    offline = [row for row in measured if row["id"].startswith("TRT10") and "70B" in row["model"]]
    assert mape(compare(HARDWARE, offline[::4]), "throughput")[1] < 12
