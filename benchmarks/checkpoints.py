"""Checkpoints of real shapes with random weights, made on demand. Speed does not depend on the values of weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

if TYPE_CHECKING:
    import torch

from argosy.bench.target import WORDS

FIRST_WORD = 10
"""Lowest id of a token with text. Lower ids are special tokens."""

SHAPES: dict[str, dict[str, object]] = {
    "qwen2-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
        "bos_token_id": 0,
        "use_sliding_window": False,
    },
    "llama-160m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
        "bos_token_id": 0,
    },
    "toy": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
        "bos_token_id": 0,
    },
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 16384,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
        "bos_token_id": 0,
    },
}


def make_checkpoint(shape: str, folder: Path) -> Path:
    """Return the checkpoint of `shape` below `folder`. A missing one is made with seed 0 in bfloat16.

    Torch is loaded only to make a checkpoint, so that callers can set its environment variables before it.
    """
    path = folder / shape
    if (path / "model.safetensors").exists():
        return path
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    (path / "config.json").write_text(json.dumps(config))
    _write_tokenizer(path, int(str(config["vocab_size"])))
    torch.manual_seed(0)
    tensors = {name: random_tensor(name, shape) for name, shape in _tensor_shapes(config).items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def declare_checkpoint(shape: str, folder: Path) -> Path:
    """Return a checkpoint of `shape` whose weights are a hole in the file, so that any size takes no disk space.

    Its reader shall make the weights with `random_tensor`, for example on a GPU.
    """
    path = folder / f"{shape}-declared"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[shape]))
    header: dict[str, object] = {}
    end = 0
    for name, size in _tensor_shapes(SHAPES[shape]).items():
        begin, end = end, end + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


def random_tensor(
    name: str, shape: tuple[int, ...], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return random weights in bfloat16, or ones for a norm."""
    import torch

    if len(shape) == 1 and name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    return (torch.randn(shape, device=device) * 0.02).to(torch.bfloat16)


def _write_tokenizer(path: Path, size: int) -> None:
    """Write a tokenizer with one token per word. The load generator's words come first, so its counts are exact."""
    words = [f"t{number}" for number in range(size)]
    words[FIRST_WORD : FIRST_WORD + len(WORDS)] = WORDS
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token="t1")  # noqa: S106 - a word
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "bos_token": "t0"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def _tensor_shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    hidden, layers, heads, kv_heads, intermediate, vocabulary = (
        int(str(config[name]))
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
        )
    )
    keys = kv_heads * hidden // heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        shapes |= {
            attention + "q_proj.weight": (hidden, hidden),
            attention + "k_proj.weight": (keys, hidden),
            attention + "v_proj.weight": (keys, hidden),
            attention + "o_proj.weight": (hidden, hidden),
            mlp + "gate_proj.weight": (intermediate, hidden),
            mlp + "up_proj.weight": (intermediate, hidden),
            mlp + "down_proj.weight": (hidden, intermediate),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
        if config["model_type"] == "qwen2":
            biases = (("q_proj", hidden), ("k_proj", keys), ("v_proj", keys))
            shapes |= {f"{attention}{name}.bias": (size,) for name, size in biases}
    return shapes
