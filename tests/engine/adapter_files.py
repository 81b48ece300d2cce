"""Folders of random adapters in PEFT's format, for any checkpoint."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    base: Path,
    targets: Collection[str] = ATTENTION + MLP,
    *,
    rank: int = 4,
    seed: int = 0,
    tensors: dict[str, Tensor] | None = None,
    **config: object,
) -> Path:
    """Write an adapter of the modules of `base` that end in one of `targets`, and return its folder.

    `config` are more fields of adapter_config.json, and `tensors` more tensors by their whole names.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    stored: dict[str, Tensor] = {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets or weight.dim() != 2:
            continue
        rows, cols = weight.shape
        prefix = f"base_model.model.{module}"
        if module.endswith("embed_tokens"):
            stored[f"{prefix}.lora_embedding_A"] = draw(rank, rows)
            stored[f"{prefix}.lora_embedding_B"] = draw(cols, rank)
            continue
        stored[f"{prefix}.lora_A.weight"] = draw(rank, cols)
        stored[f"{prefix}.lora_B.weight"] = draw(rows, rank)
        if config.get("lora_bias"):
            stored[f"{prefix}.lora_B.bias"] = draw(rows)
        if config.get("use_dora"):
            norms = weight.float().norm(dim=1)
            stored[f"{prefix}.lora_magnitude_vector"] = norms * (1 + draw(rows))
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*targets]}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(stored | (tensors or {}), folder / "adapter_model.safetensors")
    return folder
