"""Engine on a GPU device: overlapping steps and captured graphs do not change a request's output."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn, get_args
from unittest import mock

import msgspec
import pytest
import torch

from argosy.engine.engine_config import WeightFormat
from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.architectures.decoder_config import read_architecture
from argosy.engine.execution.kernels.cpu.native_kernels import active_kernels_name
from argosy.engine.execution.kernels.gpu.device import read_memory_profile, write_memory_profile
from argosy.engine.execution.loading import executor_loader
from argosy.engine.scheduling import KvCacheGroups
from argosy.engine.serving.adapter_files import read_adapter_source
from argosy.engine.serving.core_messages import StepOutputs
from argosy.engine.serving.engine_core.core import EngineCore
from argosy.models import BUNDLED_MODEL
from argosy.protocol import ReasoningBlock, SamplingParams
from tests.engine.adapter_files import write_adapter
from tests.engine.core_driver import RequestOutput, create_core, run_requests
from tests.engine.decoder_driver import DecoderDriver, load_checkpoint
from tests.engine.gguf_reference import write_gguf
from tests.engine.gpu.device import INTERPRETED
from tests.engine.gpu.host_device import HostDevice, record_work
from tests.engine.stored_formats import FORMATS as STORED_FORMATS
from tests.engine.stored_formats import quantize_checkpoint, quantize_experts_to_mxfp4
from tests.engine.test_families import FAMILIES, MODELS
from tests.engine.test_gguf import BLOCK_TYPES
from tests.engine.transformers_reference import make_reference

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the host device needs interpreted kernels")

QUANTIZE: tuple[WeightFormat, ...] = get_args(WeightFormat)
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
"""Sizes for which every matrix is one tile, because the interpreter is slow."""
FORMATS = [
    pytest.param({}, id="bfloat16"),
    pytest.param(
        {"quantize": "fp8", "kv_dtype": "fp8", "kv_scales": "unit"},
        id="float8",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param({"kv_dtype": "int8"}, id="int8-cache", marks=pytest.mark.exhaustive),
]


WINDOWED = {
    "num_hidden_layers": 2,
    "use_sliding_window": True,
    "sliding_window": 9,
    "max_window_layers": 1,
}


EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 2,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 1,
}
RECURRENT = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("Llama", {}), id="full"),
        pytest.param(("Qwen2", WINDOWED), id="windowed", marks=pytest.mark.exhaustive),
        pytest.param(("Mixtral", EXPERTS), id="experts", marks=pytest.mark.exhaustive),
        pytest.param(("Qwen3_5Text", RECURRENT), id="recurrent", marks=pytest.mark.exhaustive),
        pytest.param(("DeepseekV2", LATENT), id="latent", marks=pytest.mark.exhaustive),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    family, options = request.param
    make_reference(path, family, SMALL | options, model=MODELS.get(family, ""))
    return path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HostDevice:
    """Device that the loader uses as GPU, with an empty cache of memory profiles."""
    active_kernels_name()  # builds the CPU kernels in the usual folder before it changes
    gpu = HostDevice()
    monkeypatch.setattr(executor_loader, "choose_device", lambda _config: gpu)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return gpu


def requests() -> list[EngineRequest]:
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB) for _ in range(18)]
    params_by_request = [
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=1.0, seed=7, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.8, seed=1, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=0, ignore_eos=True),
        SamplingParams(
            temperature=1.0,
            seed=2,
            max_tokens=4,
            ignore_eos=True,
            logprobs=0,
            reasoning=ReasoningBlock(end_ids=(9, 10), budget=2),
        ),
    ]
    return [
        EngineRequest(
            id=str(number),
            prompt=shared[: 18 * (number % 2)]
            + [rng.randrange(3, VOCAB) for _ in range(number + 2)],
            params=params,
        )
        for number, params in enumerate(params_by_request)
    ]


def create_gpu_core(model: Path, **options: object) -> EngineCore:
    settings = {"device": "cuda", "num_blocks": 32, "max_seqs": 4, "max_step_tokens": 64}
    return create_core(model, **(settings | options))


def reference_outputs(model: Path, gpu: HostDevice, **options: object) -> dict[str, RequestOutput]:
    """Run each request alone, one step at a time, without graphs."""
    with mock.patch.object(gpu, "capture_graph", None):
        core = create_gpu_core(model, max_steps_in_flight=0, prefix_cache=False, **options)
    return {request.id: run_requests(core, [request])[request.id] for request in requests()}


def assert_outputs_equal(
    actual: dict[str, RequestOutput], expected: dict[str, RequestOutput]
) -> None:
    for request_id, output in expected.items():
        assert actual[request_id].tokens == output.tokens, f"request {request_id}"
        assert actual[request_id].logprobs == output.logprobs
        assert actual[request_id].prompt_logprobs == output.prompt_logprobs


@pytest.mark.parametrize("options", FORMATS)
def test_graphs_caching_and_preemption_do_not_change_output(
    model: Path, gpu: HostDevice, options: dict[str, object]
) -> None:
    if "kv_dtype" in options and read_architecture(model).latent is not None:
        pytest.skip("latents have no cache of bytes on GPUs")
    expected = reference_outputs(model, gpu, **options)
    assert expected["4"].tokens[2:4] == [9, 10], "the budget closes the reasoning block"
    assert not gpu.graphs
    core = create_gpu_core(model, **options)
    captured = [graph.size for graph in gpu.graphs]
    assert captured == [4, 2, 1], "the largest graph is captured first"
    assert_outputs_equal(run_requests(core, requests()), expected)
    assert sum(graph.replays for graph in gpu.graphs) > 3
    second_run = run_requests(core, requests())
    assert sum(output.cached_tokens or 0 for output in second_run.values()) > 0
    assert_outputs_equal(second_run, expected)
    if options:
        return
    small_pool = KvCacheGroups(core.scheduler.limits.kv_windows, block_size=4).count_blocks(36)
    small_core = create_gpu_core(
        model, block_size=4, num_blocks=small_pool, max_step_tokens=7, host_kv_bytes=1 << 20
    )
    small_core.scheduler.output_estimator.fraction = 0.0
    assert_outputs_equal(run_requests(small_core, requests()), expected)
    assert small_core.scheduler.preemptions > 0
    (evicted,) = requests()[1:2]
    assert_outputs_equal(run_requests(small_core, [evicted]), {"1": expected["1"]})
    assert small_core.scheduler.kv_cache.host_hit_tokens > 0


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.01, "temperature": 0.9},
    {"allowed_token_ids": (4, 5, 6), "logprobs": 0, "prompt_logprobs": 1},
    {"reasoning": ReasoningBlock(end_ids=(9, 10), budget=2)},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 2},
    {"logit_bias": {5: 1.0}, "banned_token_ids": (7,), "logprobs": 2},
]
"""Parameters of two sequences at a time."""


@pytest.mark.exhaustive
def test_adapters_share_a_batch_with_rows_that_keep_their_bits(
    model: Path, gpu: HostDevice, tmp_path: Path
) -> None:
    """Steps without an adapter are replayed as graphs, and others are not."""
    source = read_adapter_source(write_adapter(tmp_path / "adapter", model, ["o_proj"], rank=8))
    base, tuned = requests()[:2]
    base = msgspec.structs.replace(base, params=SamplingParams(temperature=0.0, max_tokens=6))
    tuned = msgspec.structs.replace(tuned, adapter=source)
    core = create_gpu_core(model, enable_lora=True, max_step_tokens=8)
    alone = [run_requests(core, [request]) for request in (base, tuned)]
    assert_outputs_equal(run_requests(core, [base, tuned]), alone[0] | alone[1])
    assert sum(graph.replays for graph in gpu.graphs) > 3
    (untuned,) = run_requests(core, [msgspec.structs.replace(tuned, adapter=None)]).values()
    assert untuned.tokens != alone[1][tuned.id].tokens


@pytest.mark.parametrize("captures", [True, False])
def test_steps_wait_for_nothing_but_sampled_tokens(
    model: Path, gpu: HostDevice, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for one event at most, whatever the parameters, with evicted blocks and hits in host memory."""
    if not captures:
        gpu.capture_graph = None
    core = create_gpu_core(model, block_size=4, num_blocks=9, max_seqs=2, host_kv_bytes=1 << 20)
    step, waits = core.step, []

    def record_step() -> StepOutputs:
        outputs = []
        waits.append(record_work(lambda: outputs.append(step())).waits)
        return outputs[0]

    monkeypatch.setattr(core, "step", record_step)
    for number, prompt in enumerate(([*range(3, 22)], [8] * 19, [*range(3, 22)])):
        pair = [
            SamplingParams(max_tokens=4, ignore_eos=True, seed=1, **options)
            for options in PARAMS[2 * number : 2 * number + 2]
        ]
        requests = [
            EngineRequest(id=f"{number} {each}", prompt=prompt, params=params)
            for each, params in enumerate(pair)
        ]
        run_requests(core, requests)
    assert core.scheduler.kv_cache.host_hit_tokens > 0
    assert sum(graph.replays for graph in gpu.graphs) >= 9 * captures
    assert not [each for each in waits if each not in ([], ["event"])]


@pytest.mark.exhaustive
def test_warm_up_runs_all_kernels(model: Path, gpu: HostDevice) -> None:
    """A GPU compiles each kernel when it is first launched, which would delay all requests."""
    gpu.capture_graph = None
    cores: list[EngineCore] = []
    with mock.patch.object(gpu, "warmup_sizes", (1, 2)):
        warm_up = record_work(lambda: cores.append(create_gpu_core(model, warmup=True)))
    params = SamplingParams(top_k=9, top_p=0.9, presence_penalty=1.0, min_tokens=2, max_tokens=2)
    request = EngineRequest(id="all", prompt=[5, 6, 7], params=params)
    serving = record_work(lambda: run_requests(cores[0], [request]))
    missing = {name for name in serving.launches if name.startswith("_")} - {*warm_up.launches}
    assert not missing


def test_failed_graph_capture_is_tolerated(model: Path, gpu: HostDevice) -> None:
    def fail_to_capture(_work: object) -> NoReturn:
        raise RuntimeError("operation not permitted when stream is capturing")

    gpu.capture_graph = fail_to_capture
    core = create_gpu_core(model)
    output = run_requests(core, requests()[:1])["0"]
    assert len(output.tokens) == 4


def test_memory_is_measured_once_per_model_and_settings(
    model: Path, gpu: HostDevice, tmp_path: Path
) -> None:
    create_gpu_core(model, num_blocks=None)
    captured = [graph.size for graph in gpu.graphs]
    assert captured == [4, 2, 1] * 2, "to measure their memory and to replay"
    gpu.capture_graph = None
    for _ in range(2):
        create_gpu_core(model, num_blocks=None)
    assert gpu.measurements == 2, "with and without graphs"
    create_gpu_core(model, kv_memory_bytes=1 << 20)
    create_gpu_core(model)
    assert gpu.measurements == 2, "the settings state the size of the KV cache"
    (first, *_) = sorted((tmp_path / "argosy" / "memory").iterdir())
    for damage in (b"", b"{}", b'{"key": "another", "working_bytes": 1}'):
        for path in first.parent.iterdir():
            path.write_bytes(damage)
        create_gpu_core(model, num_blocks=None)
    assert gpu.measurements == 5


def test_kv_cache_size_follows_free_memory(model: Path, gpu: HostDevice) -> None:
    gpu.capture_graph = None
    core = create_gpu_core(model, num_blocks=None, max_seqs=2)
    max_useful_blocks = core.scheduler.limits.num_blocks
    gpu.available_bytes = (
        (512 << 20) + (1 << 20) + max_useful_blocks * 512
    )  # margin, step, half the cache
    core = create_gpu_core(model, num_blocks=None, max_seqs=2)
    assert 0 < core.scheduler.limits.num_blocks < max_useful_blocks
    gpu.available_bytes = 1 << 20
    with pytest.raises(ValueError, match="no memory for one KV block"):
        create_gpu_core(model, num_blocks=None, max_seqs=2)


def test_unwritable_cache_keeps_no_memory_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "argosy").write_text("a file where a directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_memory_profile("key", 5)
    assert read_memory_profile("key") is None


def test_unsupported_formats_are_rejected_with_remedy(model: Path, gpu: HostDevice) -> None:
    gpu.compute_capability = (8, 0)
    with pytest.raises(ValueError, match="remove quantize fp8"):
        create_gpu_core(model, quantize="fp8")
    with pytest.raises(ValueError, match="remove kv_dtype fp8"):
        create_gpu_core(model, kv_dtype="fp8", kv_scales="unit")
    with pytest.raises(ValueError, match="set kv_dtype to int8"):
        create_gpu_core(model, kv_dtype="fp8")


def test_missing_gpu_is_reported_with_remedy() -> None:
    with pytest.raises(ValueError, match="choose --device cpu"):
        create_core(BUNDLED_MODEL, device="cuda")
    with pytest.raises(ValueError, match="set kv_dtype to auto or int8"):
        create_core(BUNDLED_MODEL, device="cpu", kv_dtype="fp8", kv_scales="unit")


DENSE_LAYER = {"_norm": 2, "_matmul": 4, "rotate_and_store": 1, "attend": 1, "_gated_activation": 1}
"""Launches of a decoder layer, with norms of queries and keys or without."""


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_dense_layer_launches_each_kernel_once(tmp_path: Path, family: str) -> None:
    launches = []
    for layers in (1, 2):
        make_reference(tmp_path, family, SMALL | {"num_hidden_layers": layers, "head_dim": 16})
        driver = DecoderDriver(load_checkpoint(tmp_path, torch.bfloat16, device=HostDevice()))
        work = record_work(lambda: driver.forward([("decode", [5])]))  # noqa: B023 - runs at once
        launches.append(Counter(work.launches))
    assert launches[1] - launches[0] == DENSE_LAYER


DEFAULT_TIER = {"gpt-oss in MXFP4", "fp8 block"}
CASES = [
    *FAMILIES,
    "gpt-oss in MXFP4",
    *STORED_FORMATS,
    *(f"GGUF {kind}" for kind in BLOCK_TYPES),
    *(f"quantized to {each}" for each in QUANTIZE),
]


def write_model(path: Path, case: str) -> Path:
    """Write the checkpoint of a case, in one layer if the family allows it, and return the path of the model."""
    sizes: dict[str, Any] = {"intermediate_size": 64, "num_hidden_layers": 1}
    if case == "gpt-oss in MXFP4":
        experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}
        quantize_experts_to_mxfp4(make_reference(path, "GptOss", sizes | experts))
    elif case in FAMILIES:
        family, options = FAMILIES[case]
        if case.startswith(("qwen 3.5", "qwen 3 next")):
            sizes = {"num_hidden_layers": 2, "layer_types": RECURRENT["layer_types"]}
        elif case != "mixtral":
            sizes = {}
        make_reference(path, family, options | sizes, model=MODELS.get(family, ""))
    elif case.startswith("GGUF"):
        experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "hidden_size": 256}
        reference = make_reference(path, "Mixtral", sizes | experts | {"intermediate_size": 256})
        write_gguf(path / "model.gguf", reference, case.removeprefix("GGUF "))
        return path / "model.gguf"
    else:
        reference = make_reference(path, "Qwen2", sizes | {"attention_bias": True})
        if case in STORED_FORMATS:
            quantize_checkpoint(reference, STORED_FORMATS[case])
    return path


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in DEFAULT_TIER else pytest.mark.exhaustive)
        for case in CASES
    ],
)
def test_every_family_and_format_is_computed(tmp_path: Path, case: str) -> None:
    """A prompt's logits are those of the CPU, as far as bfloat16 has them, and do not depend on its chunks."""
    path = write_model(tmp_path, case)
    quantize = next((each for each in QUANTIZE if case == f"quantized to {each}"), None)
    prompt = list(range(3, 10))
    cpu = load_checkpoint(path, torch.float32, quantize="none")
    expected = DecoderDriver(cpu).logits_in_one_chunk(prompt)
    gpu = DecoderDriver(
        load_checkpoint(path, torch.bfloat16, device=HostDevice(), quantize=quantize)
    )
    logits = gpu.logits_in_one_chunk(prompt)
    if case in {"fp8 block", "fp8 channel", "gptq"}:  # a weight is rounded to bfloat16 once
        rounded = load_checkpoint(path, torch.bfloat16, device=HostDevice(), quantize="none")
        assert torch.equal(DecoderDriver(rounded).logits_in_one_chunk(prompt), logits)
    error = ((logits - expected).std(-1) / expected.std(-1)).median()
    assert error < {None: 0.06, "int4": 0.3}.get(quantize, 0.1)
    first, second = (gpu.forward([("chunks", part)])[0] for part in (prompt[:2], prompt[2:]))
    assert torch.equal(torch.cat([first, second]), logits)
