"""GGUF files: blocks as the `gguf` package dequantizes them, families against transformers, tokenizer and template."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from argosy.engine.engine_config import EngineConfig
from argosy.engine.execution.architectures.decoder_config import read_architecture
from argosy.engine.execution.checkpoint_formats.checkpoint import resolve_model_path
from argosy.engine.execution.checkpoint_formats.gguf_file import GGUF_TYPES, GgufTensor
from argosy.engine.execution.checkpoint_formats.gguf_tensors import BlockTensor
from argosy.engine.execution.loading.executor_loader import load_executor
from argosy.engine.execution.loading.model_selection import select_implementation
from tests.engine.decoder_driver import (
    DecoderDriver,
    assert_stored_integers_match,
    load_checkpoint,
)
from tests.engine.gguf_reference import dequantize, random_blocks, write_gguf
from tests.engine.transformers_reference import VOCAB, make_reference

BLOCK_TYPES = [each.name for each in GGUF_TYPES.values() if each.block_size > 1]
PROMPTS = [[(7 * i + 3) % VOCAB for i in range(length)] for length in (3, 18, 40)]
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {"attention_bias": True, "rope_theta": 1000.0}, "Q4_0"),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}, "Q8_0"),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "Q8_0"),
    "mistral": ("Mistral", {"sliding_window": None}, "F16"),
    "qwen 2": ("Qwen2", {}, "Q5_1"),
    "qwen 3": ("Qwen3", {"head_dim": 32}, "Q4_1"),
    "qwen 3 moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        | {"norm_topk_prob": True, "head_dim": 16},
        "BF16",
    ),
    "phi 3": ("Phi3", {"sliding_window": 12}, "Q5_0"),
    "gemma 2": ("Gemma2", GEMMA, "Q8_0"),
    "gemma 3": ("Gemma3Text", GEMMA | {"num_hidden_layers": 7}, "F32"),
    "olmo 2": ("Olmo2", {}, "IQ4_NL"),
    "k blocks": ("Llama", {"hidden_size": 256, "intermediate_size": 256}, "Q4_K"),
    "k blocks, 6 bits": ("Qwen2", {"hidden_size": 256, "intermediate_size": 256}, "Q6_K"),
}
MODELS = {"Gemma3Text": "Gemma3ForCausalLM"}


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_equal_those_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    blocks = random_blocks((6, 512), kind)
    file = tmp_path / "blocks"
    file.write_bytes(blocks.tobytes())
    tensor_type = next(each for each in GGUF_TYPES.values() if each.name == kind)
    tensor = GgufTensor("w", (6, 512), tensor_type, file, 0, blocks.nbytes)
    values = BlockTensor("w", tensor, None, None).dequantize().numpy()
    assert np.array_equal(values, dequantize(blocks, kind))


@pytest.mark.parametrize("name", FAMILIES)
def test_family_matches_transformers(tmp_path: Path, name: str) -> None:
    family, options, kind = FAMILIES[name]
    reference = make_reference(tmp_path, family, options, model=MODELS.get(family, ""))
    folder = tmp_path / "gguf"
    folder.mkdir()
    write_gguf(folder / "model.gguf", reference, kind)
    path = resolve_model_path(str(folder), None)
    assert path == folder / "model.gguf"
    assert read_architecture(path).eos_token_ids == (2,)
    assert_stored_integers_match(path, reference, PROMPTS, native_error=0.2)


LLAMA_3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA_3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "rope_theta": 1000.0}
LONG |= {
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [2.0**i for i in range(8)],
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0}
ROPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "linear": (
        "Qwen2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
        {"qwen2__rope__scaling__type": "linear", "qwen2__rope__scaling__factor": 4.0},
        (),
    ),
    "yarn": (
        "Qwen2",
        {"rope_parameters": YARN | {"original_max_position_embeddings": 64}},
        {"qwen2__rope__scaling__type": "yarn", "qwen2__rope__scaling__factor": 4.0}
        | {"qwen2__rope__scaling__original_context_length": 64},
        (),
    ),
    "llama 3": ("Llama", {"rope_parameters": LLAMA_3}, {}, ("rope_freqs.weight",)),
    "longrope": (
        "Phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 32},
        {"phi3__rope__scaling__original_context_length": 32}
        | {"phi3__rope__scaling__attn_factor": math.sqrt(1 + math.log(8) / math.log(32))},
        ("rope_factors_short.weight", "rope_factors_long.weight"),
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_scaled_rope_is_read(tmp_path: Path, name: str) -> None:
    family, options, metadata, factor_names = ROPES[name]
    reference = make_reference(tmp_path, family, options | {"num_hidden_layers": 2})
    factors = {}
    if name == "llama 3":  # the converter stores a divisor of each frequency
        plain = 500.0 ** (-torch.arange(0, 16, 2) / 16)
        factors["rope_freqs.weight"] = (plain / reference.model.model.rotary_emb.inv_freq).numpy()
    elif factor_names:
        for tensor, key in zip(factor_names, ("short_factor", "long_factor"), strict=True):
            factors[tensor] = np.array(LONG[key], np.float32)
    file = tmp_path / "model.gguf"
    write_gguf(file, reference, "F32", factors, **metadata)
    decoder = load_checkpoint(file)
    driver = DecoderDriver(decoder)
    for prompt in PROMPTS[2:]:  # longer than the original context
        torch.testing.assert_close(
            driver.logits_in_one_chunk(prompt), reference.logits(prompt), rtol=1e-4, atol=2e-4
        )


def test_parts_of_a_file_are_one_model(tmp_path: Path) -> None:
    reference = make_reference(tmp_path, "Qwen2", {})
    folder = tmp_path / "parts"
    folder.mkdir()
    write_gguf(folder / "m.gguf", reference, "Q8_0", split_max_tensors=20)
    names = sorted(file.name for file in folder.iterdir())
    assert len(names) > 1
    path = resolve_model_path(str(folder), None)
    assert path.name == names[0]
    assert resolve_model_path(str(folder / names[-1]), None) == path
    with pytest.raises(ValueError, match=r"does not serve GGUF files"):
        select_implementation(path, "transformers")
    decoder = load_checkpoint(path, quantize="none")
    torch.testing.assert_close(
        DecoderDriver(decoder).logits_in_one_chunk(PROMPTS[1]),
        reference.logits(PROMPTS[1]),
        rtol=1e-4,
        atol=2e-4,
    )
    config = EngineConfig(model=str(path), threads=1, warmup=False, num_blocks=64)
    described = load_executor(config, lambda _activity, _fraction: None).model
    assert described is not None
    assert described.format == "gguf"
    assert described.size_bytes == sum((folder / name).stat().st_size for name in names)
