"""Model families against transformers: equal logits and greedy tokens from the same checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from argosy.engine.execution.architectures.decoder_config import read_architecture
from argosy.engine.execution.checkpoint_formats.reader import CheckpointReader
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.loading.self_test import run_self_test
from argosy.engine.execution.loading.weight_loader import load_decoder
from tests.engine.decoder_driver import DecoderDriver, load_checkpoint
from tests.engine.transformers_reference import VOCAB, Reference, make_reference

LENGTHS = (1, 2, 5, 16, 17, 33, 70)

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
    "partial_rotary_factor": 0.75,
}
YARN_NOT_TRUNCATED = YARN | {"truncate": False, "original_max_position_embeddings": 64}
GPT_OSS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": YARN_NOT_TRUNCATED,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
DELTA_NET = {
    "initializer_range": 0.1,  # larger weights enlarge the different rounding of transformers' chunks
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 64,
}
DELTA_NET_MOE = MOE | {"num_experts": 6, "shared_expert_intermediate_size": 40}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("Llama", {"num_key_value_heads": 4}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA_3, "tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "qwen 2": ("Qwen2", {}),
    "qwen 2 with windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen 3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "mistral without windows": ("Mistral", {"sliding_window": None}),
    "gemma 2": ("Gemma2", GEMMA | {"tie_word_embeddings": False}),
    "gemma 3": ("Gemma3Text", GEMMA | {"num_hidden_layers": 7}),
    "phi 3": ("Phi3", {"sliding_window": 12}),
    "phi 3 partial": ("Phi3", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    "olmo 2": ("Olmo2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen 3 moe": ("Qwen3Moe", MOE | {"num_experts": 8, "norm_topk_prob": True, "head_dim": 16}),
    "qwen 3 moe with dense layers": (
        "Qwen3Moe",
        MOE | {"num_experts": 4, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "gpt-oss": ("GptOss", GPT_OSS | {"head_dim": 64, "num_attention_heads": 8}),
    "gpt-oss, ragged": (  # gates reach the limit of the activation
        "GptOss",
        GPT_OSS | {"head_dim": 24, "intermediate_size": 40, "initializer_range": 0.3},
    ),
    "deepseek 2": (
        "DeepseekV2",
        LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek 2 lite": (
        "DeepseekV2",
        LATENT | {"q_lora_rank": None, "routed_scaling_factor": 1.5, "n_shared_experts": 2},
    ),
    "deepseek 3": ("DeepseekV3", LATENT | {"n_group": 4, "topk_group": 2}),
    "deepseek 3 with sizes of its head": (
        "DeepseekV3",
        LATENT
        | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"n_group": 1, "topk_group": 1, "attention_bias": True, "rope_interleave": False},
    ),
    "glm 4 moe lite": ("Glm4MoeLite", LATENT | {"norm_topk_prob": False}),
    "qwen 3.5": ("Qwen3_5Text", DELTA_NET | {"tie_word_embeddings": True}),
    "qwen 3.5 with ragged heads": (
        "Qwen3_5Text",
        DELTA_NET | {"linear_key_head_dim": 20, "linear_value_head_dim": 72},
    ),
    "qwen 3.5 moe": ("Qwen3_5MoeText", DELTA_NET | DELTA_NET_MOE),
    "qwen 3 next": ("Qwen3Next", DELTA_NET | DELTA_NET_MOE | {"mlp_only_layers": [1]}),
}
MODELS = {
    "Gemma3Text": "Gemma3ForCausalLM",
    "Qwen3_5Text": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 300.0},
    "linear": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0},
    "llama3": LLAMA_3,
    "yarn": YARN | {"original_max_position_embeddings": 64},
    "yarn, original by default": YARN,
    "yarn, attention factor": YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn, not truncated": YARN_NOT_TRUNCATED,
}


@pytest.fixture(scope="module")
def create_reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    def build(family: str, options: dict[str, Any], **settings: Any) -> Reference:  # noqa: ANN401
        path = tmp_path_factory.mktemp(family)
        return make_reference(path, family, options, model=MODELS.get(family, ""), **settings)

    return build


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)


def assert_logits_match(
    reference: Reference, driver: DecoderDriver, lengths: tuple[int, ...] = LENGTHS
) -> None:
    for prompt in prompts(lengths):
        assert_close(driver.logits_in_one_chunk(prompt), reference.logits(prompt))


def assert_sizes_match(reference: Reference) -> None:
    num_parameters = sum(parameter.numel() for parameter in reference.model.parameters())
    num_parameters += sum(
        buffer.numel()
        for key, buffer in reference.model.named_buffers()
        if key.endswith("e_score_correction_bias")
    )
    architecture = read_architecture(reference.path)
    assert architecture.num_parameters == num_parameters
    experts = sum(p.numel() for key, p in reference.model.named_parameters() if ".experts." in key)
    share = (
        architecture.moe.num_experts_per_token / architecture.moe.num_experts
        if architecture.moe
        else 1.0
    )
    assert architecture.num_active_parameters == num_parameters - experts * (1 - share)
    cached = architecture.num_kv_heads * architecture.head_dim
    parts = 1 if architecture.latent else 2
    num_cached = sum(not layer.is_recurrent for layer in architecture.layer_architectures)
    assert architecture.kv_bytes_per_token(2) == parts * num_cached * cached * 2
    exact = 0 if architecture.latent is None else architecture.latent.rope_dim
    rounded = architecture.num_kv_heads * (architecture.head_dim + 4 + exact)
    assert architecture.kv_bytes_per_token(1, has_scales=True) == parts * num_cached * rounded


@pytest.mark.parametrize("name", FAMILIES)
def test_family_matches_transformers(create_reference: Callable[..., Reference], name: str) -> None:
    family, options = FAMILIES[name]
    reference = create_reference(family, options)
    decoder = load_checkpoint(reference.path)
    driver = DecoderDriver(decoder)
    all_prompts = prompts()
    unbatched = [driver.logits_in_one_chunk(prompt) for prompt in all_prompts]
    for prompt, logits in zip(all_prompts, unbatched, strict=True):
        assert_close(logits, reference.logits(prompt))

    together = driver.forward([(f"t{i}", prompt) for i, prompt in enumerate(all_prompts)])
    for single, batched in zip(unbatched, together, strict=True):
        assert torch.equal(batched, single)

    longest = all_prompts[-1]
    chunks = [longest[:1], longest[1:9], longest[9:41], longest[41:]]
    parts = [driver.forward([("n", [7]), ("c", chunk)])[1] for chunk in chunks]
    assert torch.equal(torch.cat(parts), unbatched[-1])

    some_prompts = [all_prompts[1], all_prompts[3], all_prompts[6]]
    outputs = driver.greedy(some_prompts, 24)
    assert all(map(reference.continues, some_prompts, outputs))
    assert driver.greedy(some_prompts, 24, chunk=5) == outputs
    if not reference.model.config.tie_word_embeddings:  # tied random models repeat themselves
        assert len({token for tokens in outputs for token in tokens}) > 5
    assert_sizes_match(reference)
    batch = replace(driver.batch([("no logits", [1, 2])]), logit_index=torch.empty(0).long())
    assert decoder(batch, decoder.create_attention(1024, 16)).shape == (0, VOCAB)


@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling_matches_transformers(
    create_reference: Callable[..., Reference], name: str
) -> None:
    reference = create_reference("Llama", {"rope_parameters": ROPES[name]})
    assert_logits_match(reference, DecoderDriver(load_checkpoint(reference.path)), (1, 33, 70, 200))


@pytest.mark.parametrize(("max_len", "lengths"), [(32, (1, 17, 32)), (256, (33, 70, 200))])
def test_longrope_selects_factors_by_max_model_len(
    create_reference: Callable[..., Reference], max_len: int, lengths: tuple[int, ...]
) -> None:
    reference = create_reference(
        "Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32}
    )
    architecture = replace(read_architecture(reference.path), max_model_len=max_len)
    with structlog.testing.capture_logs() as logs:
        decoder = load_checkpoint(reference.path, architecture=architecture)
    assert_logits_match(reference, DecoderDriver(decoder), lengths)
    warnings = [entry["remedy"] for entry in logs if entry["event"] == "rope_long_factors_in_use"]
    assert warnings == ["set --max-model-len 32 if no prompt is longer"] * (max_len > 32)


def rewrite_config(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def convert_to_transformers_4(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")


def convert_gemma_3_to_transformers_4(config: dict[str, Any]) -> None:
    del config["rope_parameters"], config["layer_types"]
    config |= {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
    config |= {"sliding_window_pattern": 6, "rope_scaling": None}


def remove_layer_types(config: dict[str, Any]) -> None:
    config.pop("layer_types", None)


@pytest.mark.parametrize(
    ("family", "options", "convert"),
    [
        *(
            ("Llama", {"rope_parameters": ROPES[name]}, convert_to_transformers_4)
            for name in ("linear", "llama3", "yarn")
        ),
        *(
            (*FAMILIES[name], remove_layer_types)
            for name in ("qwen 2 with windows", "gemma 2", "mistral", "qwen 3 moe")
        ),
        (*FAMILIES["gemma 3"], convert_gemma_3_to_transformers_4),
    ],
)
def test_older_config_is_read_as_the_current_one(
    create_reference: Callable[..., Reference],
    family: str,
    options: dict[str, Any],
    convert: Callable[[dict[str, Any]], None],
) -> None:
    reference = create_reference(family, options)
    expected = read_architecture(reference.path)
    rewrite_config(reference.path, convert)
    assert read_architecture(reference.path) == expected


@pytest.mark.parametrize(
    ("stored", "tied"),
    [("equal head", True), ("other head", False), ("head only", True)],
)
def test_stored_head_of_tied_model_is_read_as_in_transformers(
    create_reference: Callable[..., Reference], stored: str, tied: bool
) -> None:
    path = create_reference(*FAMILIES["llama 3"]).path
    tensors = load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.flip(0) if stored == "other head" else embedding.clone()
    if stored == "head only":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    decoder = load_checkpoint(path)
    assert decoder.architecture.tied_embeddings is tied
    assert_logits_match(Reference(path, model.eval()), DecoderDriver(decoder), (1, 33))


@pytest.mark.parametrize(
    ("family", "options", "names"),
    [
        (
            *FAMILIES["gemma 3"],
            ["vision_tower.embeddings.weight", "model.multi_modal_projector.norm.weight"],
        ),
        (
            *FAMILIES["deepseek 3"],
            ["model.layers.3.embed_tokens.weight", "vision_tower.norm.weight"],
        ),
        (*FAMILIES["qwen 3.5"], ["mtp.norm.weight", "model.visual.norm.weight"]),
    ],
    ids=["vision tower", "second-token prediction", "multi-token prediction"],
)
def test_tensors_that_generation_does_not_need_are_skipped(
    create_reference: Callable[..., Reference],
    family: str,
    options: dict[str, Any],
    names: list[str],
) -> None:
    path = create_reference(family, options).path
    file = path / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(3) for name in names}, file)
    load_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "architecture", "old_prefix", "prefix"),
    [
        ("gemma 3", "Gemma3ForConditionalGeneration", "model.", "language_model.model."),
        ("gemma 3", "Gemma3ForConditionalGeneration", "model.", "model.language_model."),
        ("deepseek 3", "KimiK25ForConditionalGeneration", "", "language_model."),
        (
            "qwen 3.5 moe",
            "Qwen3_5MoeForConditionalGeneration",
            "model.",
            "model.language_model.",
        ),
    ],
)
def test_text_model_of_multimodal_checkpoint_is_read(
    create_reference: Callable[..., Reference],
    name: str,
    architecture: str,
    old_prefix: str,
    prefix: str,
) -> None:
    reference = create_reference(*FAMILIES[name])
    file = reference.path / "model.safetensors"
    tensors = {
        prefix + key.removeprefix(old_prefix) if key.startswith(old_prefix) else key: tensor
        for key, tensor in load_file(file).items()
    }
    save_file(tensors, file)

    def wrap(config: dict[str, Any]) -> None:
        text = dict(config)
        if name.startswith("qwen"):
            text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        config.clear()
        config |= {"architectures": [architecture], "text_config": text}

    rewrite_config(reference.path, wrap)
    assert_logits_match(reference, DecoderDriver(load_checkpoint(reference.path)), (1, 33))


@pytest.mark.parametrize("name", ["mixtral", "qwen 3 moe"])
def test_fused_expert_tensors_are_read(
    create_reference: Callable[..., Reference], name: str
) -> None:
    reference = create_reference(*FAMILIES[name])
    tensors = load_file(reference.path / "model.safetensors")
    fused = reference.model.state_dict()
    assert set(tensors) != set(fused)  # transformers splits its fused experts when it saves
    save_file(
        {key: tensor.contiguous() for key, tensor in fused.items()},
        reference.path / "model.safetensors",
    )
    assert_logits_match(reference, DecoderDriver(load_checkpoint(reference.path)), (1, 33))


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_checkpoint_is_loaded_with_progress(
    create_reference: Callable[..., Reference], tied: bool
) -> None:
    reference = create_reference("Qwen3", {"tie_word_embeddings": tied}, shard="60KB")
    assert len(list(reference.path.glob("*.safetensors"))) > 3
    progress: list[float] = []
    decoder = load_decoder(
        CheckpointReader(reference.path),
        read_architecture(reference.path),
        create_cpu_device(1),
        torch.float32,
        progress.append,
    )
    assert_logits_match(reference, DecoderDriver(decoder), (1, 33))
    assert progress == sorted(progress)
    assert (progress[0], progress[-1]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "name", ["llama 3", "gemma 3", "olmo 2", "mixtral", "gpt-oss", "deepseek 3"]
)
def test_bfloat16_logits_are_close_to_float32(
    create_reference: Callable[..., Reference], name: str
) -> None:
    family, options = FAMILIES[name]
    reference = create_reference(family, options, dtype=torch.bfloat16)
    driver = DecoderDriver(load_checkpoint(reference.path, torch.bfloat16))
    reference.model.float()
    for prompt in prompts((1, 33)):
        exact, logits = reference.logits(prompt), driver.logits_in_one_chunk(prompt)
        assert logits.dtype == torch.float32
        error = (logits - exact).std(-1) / exact.std(
            -1
        )  # per token; rounding may change the routing of some
        assert error.median() < 0.05


@pytest.mark.parametrize("name", ["gemma 3", "deepseek 3", "qwen 3.5"])
def test_self_test_finds_families_exact(
    create_reference: Callable[..., Reference], name: str
) -> None:
    """Windows have KV cache groups of their own, and recurrent states are saved at the end of a prefix."""
    decoder = load_checkpoint(create_reference(*FAMILIES[name]).path)
    assert run_self_test(decoder, create_cpu_device(1), max_model_len=256).is_exact
