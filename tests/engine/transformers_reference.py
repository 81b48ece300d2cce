"""Tiny random checkpoints made by transformers, and its results for them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers


VOCAB = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Reference:
    """Checkpoint in `path`, and the transformers model that it contains."""

    path: Path
    model: Any

    def logits(self, tokens: list[int]) -> Tensor:
        """Compute the logits [tokens, vocab] float32 of one sequence at once, without a cache."""
        with torch.no_grad():
            logits: Tensor = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.float()

    def continues(self, prompt: list[int], output: list[int]) -> bool:
        """Return whether `output` is what the model generates greedily, by computing it once."""
        logits = self.logits(prompt + output)[len(prompt) - 1 : -1]
        return logits.argmax(-1).tolist() == output


def make_reference(
    path: Path,
    family: str,
    options: dict[str, Any],
    *,
    model: str = "",
    shard: str = "1GB",
    dtype: torch.dtype = torch.float32,
) -> Reference:
    """Save a random model of `<family>Config(SIZES | options)` in `path`, with the same weights every time."""
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**(SIZES | options))
    config._attn_implementation = "eager"  # noqa: SLF001 - works in all versions
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = getattr(transformers, model or f"{family}ForCausalLM")(config).eval()
        for name, tensor in (*built.named_parameters(), *built.named_buffers()):
            # norms start as ones and biases as zeros, which would hide errors
            is_hiding = tensor.dim() == 1 or name.endswith("_bias")
            if is_hiding and not name.endswith("inv_freq"):
                torch.nn.init.normal_(tensor, mean=float(tensor.mean()), std=0.2)
        built.to(dtype).save_pretrained(path, max_shard_size=shard)
    return Reference(path, built)
