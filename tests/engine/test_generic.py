"""Models that transformers implements, over paged attention and packed weights, against transformers itself."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.decoders.generic_decoder import GenericDecoder
from argosy.engine.execution.decoders.generic_loader import load_generic_decoder
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.layers.model import Model
from argosy.engine.execution.loading.model_selection import (
    build_transformers_model,
    select_implementation,
)
from argosy.engine.execution.loading.self_test import (
    MAX_MEDIAN_DIFFERENCE,
    SelfTestResult,
    find_or_run,
    run_self_test,
)
from argosy.extras import install_command
from argosy.models import BUNDLED_MODEL
from argosy.protocol import SamplingParams
from tests.engine.core_driver import create_core, run_requests
from tests.engine.decoder_driver import DecoderDriver
from tests.engine.generic_cases import EVERY_CHANGE, GENERIC_FAMILIES, GENERIC_MODELS, MULTIMODAL
from tests.engine.transformers_reference import SIZES, VOCAB, Reference, make_reference

LENGTHS = (1, 7, 17, 40)


@pytest.fixture
def create_reference(tmp_path: Path) -> Callable[..., Reference]:
    def build(name: str, **settings: Any) -> Reference:  # noqa: ANN401
        family, options = GENERIC_FAMILIES[name]
        model = GENERIC_MODELS.get(family, "")
        return make_reference(tmp_path, family, options, model=model, **settings)

    return build


def load(path: Path, dtype: torch.dtype = torch.float32) -> GenericDecoder:
    model = build_transformers_model(path, dtype)
    return load_generic_decoder(model, create_cpu_device(1), dtype, lambda _: None)


def write_config(path: Path, values: dict[str, Any]) -> None:
    (path / "config.json").write_text(json.dumps(values))


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def assert_batch_independent(driver: DecoderDriver) -> None:
    """Compare the logits of sequences alone, together with any number of threads, and in chunks, bit for bit."""
    alone = [driver.logits_in_one_chunk(prompt) for prompt in prompts()]
    for threads in (3, 1):  # 1 is what `load` sets
        torch.set_num_threads(threads)
        chunks = [(f"{threads} {number}", prompt) for number, prompt in enumerate(prompts())]
        assert all(map(torch.equal, alone, driver.forward(chunks)))
    longest = prompts()[-1]
    cuts = [longest[:1], longest[1:9], longest[9:]]
    parts = [driver.forward([("n", [7]), ("c", chunk)])[1] for chunk in cuts]
    assert torch.equal(torch.cat(parts), alone[-1])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EVERY_CHANGE else pytest.mark.exhaustive)
        for name in GENERIC_FAMILIES
    ],
)
def test_family_matches_transformers(create_reference: Callable[..., Reference], name: str) -> None:
    reference = create_reference(name)
    decoder = load(reference.path)
    driver = DecoderDriver(decoder)
    for prompt in prompts():
        actual, expected = driver.logits_in_one_chunk(prompt), reference.logits(prompt)
        torch.testing.assert_close(
            actual.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-4
        )
    prompt = prompts()[2]
    assert reference.continues(prompt, *driver.greedy([prompt], 6))
    assert_batch_independent(driver)
    batch = replace(driver.batch([("no logits", [1, 2])]), logit_index=torch.empty(0).long())
    assert decoder.forward(batch, decoder.create_attention(1024, 16)).shape == (0, VOCAB)
    num_parameters = sum(parameter.numel() for parameter in reference.model.parameters())
    assert decoder.architecture.num_parameters == num_parameters


@pytest.mark.parametrize("name", ["nemotron", "qwen 2 moe"])
def test_bfloat16_results_do_not_depend_on_the_batch(
    create_reference: Callable[..., Reference], name: str
) -> None:
    reference = create_reference(name, dtype=torch.bfloat16)
    assert_batch_independent(DecoderDriver(load(reference.path, torch.bfloat16)))


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_engine_resumes_exactly_in_any_batch(quantize: str | None) -> None:
    def request(name: str, resumed: list[int], seed: int) -> EngineRequest:
        params = SamplingParams(seed=seed, max_tokens=12, ignore_eos=True, logprobs=1)
        prompt = [40 + seed, *range(60, 90)]
        return EngineRequest(id=name, prompt=prompt, resumed_tokens=resumed, params=params)

    options = {"model_impl": "transformers", "dtype": "bfloat16", "quantize": quantize}
    core = create_core(BUNDLED_MODEL, **options)
    (alone,) = run_requests(core, [request("alone", [], 3)]).values()
    others = [request(f"other {seed}", [], seed) for seed in range(4, 9)]
    resumed = [request(str(cut), alone.tokens[:cut], 3) for cut in range(1, 12, 3)]
    core = create_core(BUNDLED_MODEL, max_step_tokens=20, **options)
    outputs = run_requests(core, [request("batched", [], 3), *others, *resumed])
    assert outputs["batched"].tokens == alone.tokens
    assert outputs["batched"].logprobs == alone.logprobs
    for cut in range(1, 12, 3):
        assert outputs[str(cut)].tokens == alone.tokens[cut:]
        assert outputs[str(cut)].logprobs == alone.logprobs[cut:]


REFUSALS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "sinks": ("GptOss", "ForCausalLM", {"head_dim": 16, "num_local_experts": 4}, "attention sinks"),
    "latent": (
        "DeepseekV2",
        "ForCausalLM",
        {"kv_lora_rank": 32, "q_lora_rank": None, "first_k_dense_replace": 3}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
        "latent attention",
    ),
    "state": ("Mamba", "ForCausalLM", {}, "keeps a state between calls"),
    "alibi": ("Bloom", "ForCausalLM", {"n_layer": 2, "n_head": 4}, "as models with ALiBi do"),
    "attention class": ("GPTJ", "ForCausalLM", {"rotary_dim": 8}, "in its own way"),
    "chunks": ("Llama4Text", "ForCausalLM", {"head_dim": 16}, "attends within chunks"),
    "bidirectional": ("Bert", "LMHeadModel", {}, "neither to all earlier tokens nor"),
    "encoder and decoder": ("T5", "ForConditionalGeneration", {}, "use a causal language model"),
    "image classifier": ("ViT", "ForImageClassification", {}, "use a causal language model"),
    "quantized": (
        "Granite",
        "ForCausalLM",
        {"quantization_config": {"quant_method": "hqq"}},
        "HQQ is not supported; use a checkpoint of the model in GPTQ",
    ),
    "code in the checkpoint": (
        "Granite",
        "ForCausalLM",
        {"model_type": "other", "auto_map": {"AutoConfig": "code.Config"}},
        "--trust-remote-code",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_unsupported_model_is_refused_by_name(tmp_path: Path, case: str) -> None:
    family, suffix, options, reason = REFUSALS[case]
    config = getattr(transformers, f"{family}Config")(**SIZES)
    values = config.to_dict() | {"architectures": [family.removesuffix("Text") + suffix]} | options
    write_config(tmp_path, values)
    (tmp_path / "code.py").write_text("raise SystemExit('code of the checkpoint was run')")
    with pytest.raises(ValueError, match=reason):
        build_transformers_model(tmp_path, torch.float32, max_model_len=64)


def test_text_of_multimodal_model_is_served(tmp_path: Path) -> None:
    """The vision tower is not loaded, and its tensors are not missed."""
    family, options = MULTIMODAL["mistral 3"]
    model = f"{family}ForConditionalGeneration"
    reference = make_reference(tmp_path, family, options, model=model)
    decoder = load(tmp_path)
    driver = DecoderDriver(decoder)
    tokens = prompts()[2]
    torch.testing.assert_close(
        driver.logits_in_one_chunk(tokens), reference.logits(tokens), rtol=1e-4, atol=2e-4
    )
    assert decoder.architecture.num_parameters < sum(
        p.numel() for p in reference.model.parameters()
    )
    assert_batch_independent(driver)


def test_missing_and_unread_tensors_are_refused(create_reference: Callable[..., Reference]) -> None:
    path = create_reference("granite").path
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    name = "model.layers.1.mlp.up_proj.weight"
    for changed, message in (
        ({key: value for key, value in tensors.items() if key != name}, "lacks tensors of model"),
        (tensors | {"model.layers.7.mlp.up_proj.weight": torch.ones(2)}, "would not be read"),
        (tensors | {name: tensors[name][:-1].contiguous()}, "should have"),
        (tensors | {name: tensors[name] * torch.nan}, "not finite"),
    ):
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load(path)


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path, {"architectures": ["GraniteForCausalLM"]})
    assert select_implementation(tmp_path, "auto").implementation == "transformers"
    with pytest.raises(ValueError, match="use --model-impl auto"):
        select_implementation(tmp_path, "argosy")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=re.escape(install_command("transformers"))):
        select_implementation(tmp_path, "auto")
    write_config(tmp_path, {"architectures": ["LlamaForCausalLM"]})
    assert select_implementation(tmp_path, "auto").implementation == "argosy"


class LeakyDecoder(Model):
    """Decoder whose logits change with the number of sequences in a batch."""

    def __init__(self, decoder: GenericDecoder, leak: float) -> None:
        self.create_attention = decoder.create_attention  # type: ignore[method-assign]
        self.architecture = decoder.architecture
        self._decoder = decoder
        self._leak = leak

    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        logits = self._decoder.forward(batch, attention)
        return logits + torch.arange(logits.shape[1]) * self._leak * (len(batch.rows) - 1)


def test_self_test_finds_dependence_on_the_batch(
    create_reference: Callable[..., Reference],
) -> None:
    decoder = load(create_reference("granite").path)

    def test(leak: float) -> SelfTestResult:
        tested = LeakyDecoder(decoder, leak)
        return run_self_test(tested, create_cpu_device(1), max_model_len=64)

    assert test(0.0) == SelfTestResult(
        is_exact=True, failed_cases=[], failed_draft_cases=[], median_difference=0.0
    )
    inexact, wrong = test(1e-6), test(1.0)
    assert inexact.failed_cases == ["batched", "chunked", "prefix hit"]
    assert inexact.failed_draft_cases == ["verify 1", "verify 4", "verify 15"]
    assert 0 < inexact.median_difference < MAX_MEDIAN_DIFFERENCE < wrong.median_difference


def test_self_test_runs_once_for_each_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = SelfTestResult(
        is_exact=False,
        failed_cases=["chunked"],
        failed_draft_cases=["verify 4"],
        median_difference=0.25,
    )
    calls: list[str] = []
    for identity in ("a", "b", "a", "b", "a"):

        def run(name: str = identity) -> SelfTestResult:
            calls.append(name)
            return result

        assert find_or_run(identity, 16, run) == result
    assert calls == ["a", "b"]
