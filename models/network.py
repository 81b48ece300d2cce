"""Llama network in plain torch for training, and its export in Hugging Face layout.

Projections with the same input are fused (q, k, v and gate, up). The export splits them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from models.chat_format import (
    ADDED_SPECIALS,
    ASSISTANT,
    BASE_VOCABULARY,
    BEGIN,
    CALL,
    CALL_END,
    END,
    MAX_LENGTH,
    PAD,
    SYSTEM,
    THINK,
    THINK_END,
    TOOL,
    TOOLS,
    USER,
    VOCABULARY,
    token_id,
)

BEGIN_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID, END_ID, PAD_ID = (
    token_id(text) for text in (BEGIN, SYSTEM, USER, ASSISTANT, END, PAD)
)
SPACE = "\u0120"
"""Leading space of a token in the byte-level vocabulary."""
SPACE_RELATION = 0.65
_RELATED = {
    THINK: ASSISTANT, THINK_END: END, CALL: ASSISTANT, CALL_END: END, TOOLS: SYSTEM, TOOL: USER,
}  # fmt: skip
"""Token whose embedding an added token starts with."""
EPSILON = 1e-5
ROPE_THETA = 100_000.0
"""Base for 8,192 positions. With 10,000, 1,024 positions turn the slowest pair of a head by the same angle."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a network."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


BUNDLED_SHAPE = Shape(hidden=256, layers=8, heads=4, kv_heads=2, intermediate=896)
DRAFT_SHAPE = Shape(hidden=128, layers=4, heads=4, kv_heads=2, intermediate=384)


class Block(nn.Module):
    """Decoder layer with grouped-query attention and a gated feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.head_dim * (shape.heads + 2 * shape.kv_heads)
        self.attention_norm = nn.Parameter(torch.ones(shape.hidden))
        self.feed_norm = nn.Parameter(torch.ones(shape.hidden))
        self.qkv = nn.Linear(shape.hidden, width, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x [batch, time, hidden] to the same shape."""
        heads, kv_heads, dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        batch, time, hidden = x.shape
        y = F.rms_norm(x, (hidden,), self.attention_norm, EPSILON)
        qkv = self.qkv(y).view(batch, time, heads + 2 * kv_heads, dim).transpose(1, 2)
        rotated, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        low, high = rotated.chunk(2, -1)
        rotated = rotated * cos + torch.cat((-high, low), -1) * sin
        q, k = rotated[:, :heads], rotated[:, heads:]
        groups = heads // kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, hidden))
        y = F.rms_norm(x, (hidden,), self.feed_norm, EPSILON)
        gate, up = self.gate_up(y).chunk(2, -1)
        fed: Tensor = self.down(F.silu(gate) * up)
        return x + fed


class Llama(nn.Module):
    """Whole network with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        scale = 0.02 / (2 * shape.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=scale if residual else 0.02)

    def layers(self) -> Iterator[Block]:
        """Yield the decoder layers with their type."""
        for block in self.blocks:
            yield cast("Block", block)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        """Map ids [batch, time] to the logits [positions, vocabulary] of some positions of the flattened batch."""
        x = self.embedding(ids)
        for block in self.layers():
            x = block(x, cos, sin)
        x = x.flatten(0, 1)[positions]
        x = F.rms_norm(x, (self.shape.hidden,), self.norm, EPSILON)
        return F.linear(x, self.embedding.weight)


def rope_tables(shape: Shape, time: int) -> tuple[Tensor, Tensor]:
    """Return the rotary tables cos and sin [time, head_dim] in bfloat16."""
    dim = shape.head_dim
    frequency = ROPE_THETA ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = torch.arange(time, dtype=torch.float32)[:, None] * frequency[None]
    angle = torch.cat((angle, angle), -1)
    return angle.cos().bfloat16(), angle.sin().bfloat16()


def hugging_face_weights(network: Llama) -> dict[str, Tensor]:
    """Return the weights in bfloat16, under the names of `LlamaForCausalLM`."""
    shape = network.shape
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": network.embedding.weight,
        "model.norm.weight": network.norm,
    }
    for index, block in enumerate(network.layers()):
        prefix = f"model.layers.{index}."
        parts = block.qkv.weight.split((q, kv, kv))
        for name, part in zip("qkv", parts, strict=True):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = part
        gate, up = block.gate_up.weight.chunk(2)
        weights[f"{prefix}self_attn.o_proj.weight"] = block.out.weight
        weights[f"{prefix}mlp.gate_proj.weight"] = gate
        weights[f"{prefix}mlp.up_proj.weight"] = up
        weights[f"{prefix}mlp.down_proj.weight"] = block.down.weight
        weights[f"{prefix}input_layernorm.weight"] = block.attention_norm
        weights[f"{prefix}post_attention_layernorm.weight"] = block.feed_norm
    return {name: value.detach().bfloat16().contiguous().clone() for name, value in weights.items()}


def load_weights(network: Llama, folder: Path) -> None:
    """Read the weights of an exported folder into the network. Added tokens may be missing in the folder."""
    weights = load_file(folder / "model.safetensors")
    with torch.no_grad():
        embedding = weights["model.embed_tokens.weight"]
        network.embedding.weight[: len(embedding)].copy_(embedding)
        if len(embedding) == BASE_VOCABULARY:
            for text in ADDED_SPECIALS:
                related = token_id(_RELATED.get(text, PAD))
                network.embedding.weight[token_id(text)].copy_(embedding[related] * 0.7)
        network.norm.copy_(weights["model.norm.weight"])
        for index, block in enumerate(network.layers()):
            prefix = f"model.layers.{index}."
            attention = [weights[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
            feed = [weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
            block.qkv.weight.copy_(torch.cat(attention))
            block.gate_up.weight.copy_(torch.cat(feed))
            block.out.weight.copy_(weights[f"{prefix}self_attn.o_proj.weight"])
            block.down.weight.copy_(weights[f"{prefix}mlp.down_proj.weight"])
            block.attention_norm.copy_(weights[f"{prefix}input_layernorm.weight"])
            block.feed_norm.copy_(weights[f"{prefix}post_attention_layernorm.weight"])


def relate_spaced_tokens(network: Llama, tokenizer: Tokenizer) -> None:
    """Move the embedding of each word without a leading space towards the one with a space.

    A value in JSON has no space before it, the same value in a sentence has one. A copy from one to the other is simple
    if all such pairs of embeddings differ by about the same vector.
    """
    vocabulary = tokenizer.get_vocab()
    pairs = [
        (index, vocabulary[SPACE + word])
        for word, index in vocabulary.items()
        if word.isalpha() and word.isascii() and SPACE + word in vocabulary
    ]
    plain, spaced = (torch.tensor(column) for column in zip(*pairs, strict=True))
    with torch.no_grad():
        weight = network.embedding.weight
        offset = (weight[spaced] - weight[plain]).mean(0)
        weight[plain] = torch.lerp(weight[plain], weight[spaced] - offset, SPACE_RELATION)


def model_config(shape: Shape) -> dict[str, object]:
    """Return the content of a network's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": MAX_LENGTH,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": PAD_ID,
        "rms_norm_eps": EPSILON,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }


def export(network: Llama, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors. The weights are replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    generation = {
        "bos_token_id": BEGIN_ID,
        "do_sample": False,
        "eos_token_id": END_ID,
        "max_length": MAX_LENGTH,
        "pad_token_id": PAD_ID,
    }
    for name, value in (
        ("config.json", model_config(network.shape)),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary = folder / "model.safetensors.part"
    save_file(hugging_face_weights(network), temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(folder / "model.safetensors")
