"""Translation of a GGUF file's metadata to the keys of config.json, and of its tensor names. Needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from argosy.engine.execution.checkpoint_formats.gguf_file import GgufFile, read_gguf

END_OF_TURN_TOKENS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "</s>",
        "<|return|>",
        "<|call|>",
    }
)
"""Control tokens that end an answer, whatever the file's `eos_token_id` says. llama.cpp has the same rule."""
_CONTROL_TOKEN = 3
_LARGEST_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of Gemma's 27B models, whose attention scale differs and is not in the file."""

_LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
}
_SANDWICH_NAMES = _LLAMA_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_BLOCK_NAME = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>[a-z_]+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How llama.cpp stores one architecture."""

    architecture: str
    """Name in `architectures`."""
    names: dict[str, str]
    has_permuted_heads: bool = False
    """Whether the rows of q and k alternate between the halves that a rotation pairs."""
    norm_offset: float = 0.0
    """Number that was added to norm weights."""


_FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", _LLAMA_NAMES, has_permuted_heads=True),
    "mistral": GgufFamily("MistralForCausalLM", _LLAMA_NAMES, has_permuted_heads=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", _LLAMA_NAMES),
    "qwen3": GgufFamily("Qwen3ForCausalLM", _LLAMA_NAMES),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", _LLAMA_NAMES),
    "phi3": GgufFamily("Phi3ForCausalLM", _LLAMA_NAMES | {"ffn_up": "mlp.gate_up_proj"}),
    "gemma2": GgufFamily("Gemma2ForCausalLM", _SANDWICH_NAMES, norm_offset=1.0),
    "gemma3": GgufFamily("Gemma3ForCausalLM", _SANDWICH_NAMES, norm_offset=1.0),
    "olmo2": GgufFamily("Olmo2ForCausalLM", _SANDWICH_NAMES),
}
_MIXTRAL = GgufFamily(
    "MixtralForCausalLM",
    _LLAMA_NAMES
    | {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
    },
    has_permuted_heads=True,
)


def find_gguf_family(file: GgufFile) -> GgufFamily:
    """Return how the file's architecture is stored.

    Raises:
        ValueError: It is not supported.
    """
    name = file.metadata.get("general.architecture")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ValueError(
            f"{file.path}: general.architecture is {str(name)[:80]!r}; Argosy reads {', '.join(_FAMILIES)} from GGUF; "
            "use the safetensors checkpoint of the model"
        )
    return _MIXTRAL if name == "llama" and _number(file, "expert_count") else family


def checkpoint_name(family: GgufFamily, name: str) -> str | None:
    """Return the name of a tensor in safetensors checkpoints, or None for one that config values replace.

    The name of a tensor with all experts has `{e}` for the number of the expert.
    """
    if name in _ROPE_TENSORS:
        return None
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        part, _, kind = name.rpartition(".")
        return f"{_OUTER_NAMES[part]}.{kind}" if part in _OUTER_NAMES else name
    stored = family.names.get(match["part"])
    return name if stored is None else f"model.layers.{match['layer']}.{stored}.{match['kind']}"


def read_gguf_config(path: Path) -> dict[str, object]:
    """Read the values of config.json from a GGUF file.

    Raises:
        ValueError: The file is damaged, or its architecture is not supported.
    """
    file = read_gguf(path)
    family = find_gguf_family(file)
    architecture = str(file.metadata["general.architecture"])
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(
            f"{path} has no tensor token_embd.weight; it is not a language model, or the file is damaged"
        )
    config: dict[str, object] = {
        "architectures": [family.architecture],
        "vocab_size": embedding.shape[0],
        "hidden_size": _number(file, "embedding_length"),
        "intermediate_size": _number(file, "feed_forward_length"),
        "num_hidden_layers": _number(file, "block_count"),
        "num_attention_heads": _number(file, "attention.head_count"),
        "num_key_value_heads": _number(file, "attention.head_count_kv"),
        "head_dim": _number(file, "attention.key_length"),
        "max_position_embeddings": _number(file, "context_length"),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "hidden_act": "silu",
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf_eos_token_ids(file),
        "sliding_window": _number(file, "attention.sliding_window"),
        "rope_parameters": _rope_parameters(file),
        "original_max_position_embeddings": _number(file, "rope.scaling.original_context_length"),
        "dtype": "float16",
    }
    config |= _family_values(file, architecture, config)
    return {key: value for key, value in config.items() if value is not None}


def _family_values(
    file: GgufFile, architecture: str, config: dict[str, object]
) -> dict[str, object]:
    """Return the values that only some architectures have."""
    if architecture.startswith("gemma"):
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = config["head_dim"]
        is_largest = config["num_hidden_layers"] == _LARGEST_GEMMA_LAYERS[architecture]
        if is_largest and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            head_dim = hidden / heads
        local_theta = _number(file, "rope.freq_base_swa")
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": head_dim,
            "attn_logit_softcapping": _number(file, "attn_logit_softcapping"),
            "final_logit_softcapping": _number(file, "final_logit_softcapping")
            if architecture == "gemma2"
            else None,
            "rope_local_base_freq": local_theta or (10_000.0 if architecture == "gemma3" else None),
        }
    if _number(file, "expert_count"):
        return {
            "num_experts": _number(file, "expert_count"),
            "num_local_experts": _number(file, "expert_count"),
            "num_experts_per_tok": _number(file, "expert_used_count"),
            "moe_intermediate_size": _number(file, "expert_feed_forward_length"),
            "intermediate_size": config["intermediate_size"]
            or _number(file, "expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    if architecture == "qwen2":
        return {"use_sliding_window": False}
    return {}


def _number(file: GgufFile, key: str) -> object:
    """Return a value of the file's architecture, or None if absent."""
    return file.metadata.get(f"{file.metadata.get('general.architecture')}.{key}")


def _rope_parameters(file: GgufFile) -> dict[str, object]:
    theta = _number(file, "rope.freq_base")
    rope: dict[str, object] = {"rope_theta": 10_000.0 if theta is None else theta}
    original_len = _number(file, "rope.scaling.original_context_length")
    rotary_dim, head_dim = _number(file, "rope.dimension_count"), _head_dim(file)
    if isinstance(rotary_dim, int) and head_dim and 0 < rotary_dim < head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    if "rope_freqs.weight" in file.tensors:  # llama 3: a divisor of each frequency
        factors = _factors(file, "rope_freqs.weight")
        return rope | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }
    if "rope_factors_long.weight" in file.tensors:
        return rope | {
            "rope_type": "longrope",
            "short_factor": _factors(file, "rope_factors_short.weight"),
            "long_factor": _factors(file, "rope_factors_long.weight"),
            "original_max_position_embeddings": original_len,
            "attention_factor": _number(file, "rope.scaling.attn_factor"),
        }
    kind = _number(file, "rope.scaling.type")
    factor = _number(file, "rope.scaling.factor")
    if kind in (None, "none") and factor in (None, 0.0, 1.0):
        return rope
    return rope | {
        "rope_type": "linear" if kind in (None, "none") else kind,
        "factor": factor,
        "original_max_position_embeddings": original_len,
        "attention_factor": _number(file, "rope.scaling.attn_factor"),
    }


def _head_dim(file: GgufFile) -> int | None:
    stated = _number(file, "attention.key_length")
    hidden, heads = _number(file, "embedding_length"), _number(file, "attention.head_count")
    if isinstance(stated, int):
        return stated
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return hidden // heads
    return None


def _factors(file: GgufFile, name: str) -> list[float]:
    """Read divisors of frequencies."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise ValueError(f"{file.path} has no vector {name} in F32; the file is damaged")
    return cast("list[float]", tensor.read_bytes().view(np.float32).tolist())


def gguf_eos_token_ids(file: GgufFile) -> list[int]:
    """Return the ids of the tokens that end an answer."""
    ids = [
        file.metadata.get(f"tokenizer.ggml.{name}")
        for name in ("eos_token_id", "eot_token_id", "eom_token_id")
    ]
    tokens, kinds = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(kinds) == len(tokens):
        ids += [
            int(index)
            for index in np.flatnonzero(kinds == _CONTROL_TOKEN)
            if isinstance(tokens[index], bytes)
            and tokens[index].decode("utf-8", "replace") in END_OF_TURN_TOKENS
        ]
    return sorted({token_id for token_id in ids if isinstance(token_id, int)})
