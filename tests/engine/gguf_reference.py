"""GGUF files of tiny models, written with the `gguf` package's names, and its dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from tests.engine.transformers_reference import Reference

ARCHITECTURES = {
    "Llama": "llama",
    "Mistral": "llama",
    "Mixtral": "llama",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3moe",
    "Phi3": "phi3",
    "Gemma2": "gemma2",
    "Gemma3Text": "gemma3",
    "Olmo2": "olmo2",
}
HALVES = {
    "Q6_K": (208,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "MXFP4": (),
}
"""Bytes of a block where float16 scales start, 0 for the other types."""


def random_blocks(shape: tuple[int, ...], kind: str, seed: int = 0) -> NDArray[np.uint8]:
    """Return random blocks of a tensor, whose weights have a standard deviation of about 0.1 in rows of 64.

    It falls with the root of the row's length, so that outputs stay in the range of their inputs.
    """
    quantization = gguf.GGMLQuantizationType[kind]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(
        0, 256, (*shape[:-1], shape[-1] // block_size, block_bytes), dtype=np.uint8
    )
    starts = HALVES.get(kind, (0,))
    scales = {start: generator.normal(0, 0.003, blocks.shape[:-1]) for start in starts}

    def set_scales(factor: float) -> None:
        for start, values in scales.items():
            halves = (values * factor).astype(np.float16)
            blocks[..., start : start + 2] = halves[..., None].view(np.uint8)

    set_scales(1.0)
    if scales:
        set_scales(
            0.8 / shape[-1] ** 0.5 / float(dequantize(blocks.reshape(*shape[:-1], -1), kind).std())
        )
    if kind == "MXFP4":
        blocks[..., 0] = generator.integers(116, 122, blocks.shape[:-1])
    return blocks.reshape(*shape[:-1], -1)


def dequantize(blocks: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    values: NDArray[np.float32] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return values


def write_gguf(
    path: Path,
    reference: Reference,
    kind: str,
    rope_factors: dict[str, Any] | None = None,
    *,
    split_max_tensors: int = 0,
    **metadata: Any,  # noqa: ANN401
) -> None:
    """Store the reference's weights as llama.cpp's converter does, with matrices of random blocks of `kind`.

    The reference gets the dequantized matrices. "F32", "F16" and "BF16" keep its own.
    """
    model, config = reference.model, reference.model.config
    family = type(config).__name__.removesuffix("Config")
    name = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, name, split_max_tensors=split_max_tensors)
    write_sizes(writer, config, family)
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    architecture = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    for factor_name, factors in (rope_factors or {}).items():
        writer.add_tensor(factor_name, factors)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    state = merge_experts(model.state_dict(), family)
    for index, (stored, tensor) in enumerate(state.items()):
        if stored == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        mapped = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, stored
        if values.ndim == 1:
            is_gemma_norm = family.startswith("Gemma") and stored.endswith("norm.weight")
            stored_values = permute(values, stored, config, name)
            writer.add_tensor(mapped, stored_values + 1 if is_gemma_norm else stored_values)
            continue
        is_router = "gate_inp" in mapped
        quantization = gguf.GGMLQuantizationType["F32" if is_router else kind]
        block_size, _ = gguf.GGML_QUANT_SIZES[quantization]
        if block_size == 1:
            data = gguf.quants.quantize(permute(values, stored, config, name), quantization)
            tensor.copy_(
                torch.from_numpy(
                    gguf.quants.dequantize(gguf.quants.quantize(values, quantization), quantization)
                )
            )
        else:
            data = random_blocks(values.shape, kind, seed=index)
            tensor.copy_(torch.from_numpy(unpermute(dequantize(data, kind), stored, config, name)))
        writer.add_tensor(mapped, data, raw_dtype=quantization)
    if config.tie_word_embeddings:
        model.tie_weights()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_sizes(writer: Any, config: Any, family: str) -> None:  # noqa: ANN401
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if getattr(config, "sliding_window", None) and (family.startswith("Gemma") or family == "Phi3"):
        writer.add_sliding_window(config.sliding_window)
    if family == "Gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(
            getattr(config, "moe_intermediate_size", config.intermediate_size)
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_eos_token_id(config.eos_token_id)


def merge_experts(state: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """Split the fused gate and up matrices of transformers' experts, as views."""
    split: dict[str, torch.Tensor] = {}
    prefix = "block_sparse_moe" if family == "Mixtral" else "mlp"
    for name, tensor in state.items():
        layer = name.partition(".mlp.")[0]
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            split[
                f"{layer}.{prefix}.experts.{'w1' if family == 'Mixtral' else 'gate_proj'}.weight"
            ] = gate
            split[
                f"{layer}.{prefix}.experts.{'w3' if family == 'Mixtral' else 'up_proj'}.weight"
            ] = up
        elif name.endswith("experts.down_proj"):
            split[
                f"{layer}.{prefix}.experts.{'w2' if family == 'Mixtral' else 'down_proj'}.weight"
            ] = tensor
        elif name.endswith("mlp.gate.weight"):
            split[f"{layer}.{prefix}.gate.weight"] = tensor
        else:
            split[name] = tensor
    return split


def _heads(stored: str, config: Any, name: str) -> int | None:  # noqa: ANN401
    if name != "llama" or "_proj" not in stored:
        return None
    return {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        stored.split(".")[-2]
    )


def permute(values: Any, stored: str, config: Any, name: str) -> Any:  # noqa: ANN401
    """Reorder the rows of q and k as the converter does: the halves of each head alternate."""
    heads = _heads(stored, config, name)
    if heads is None:
        return values
    rows = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(values.shape))


def unpermute(values: Any, stored: str, config: Any, name: str) -> Any:  # noqa: ANN401
    heads = _heads(stored, config, name)
    if heads is None:
        return values
    rows = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(values.shape))
