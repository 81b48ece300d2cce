"""Quantized copies of a random-weight checkpoint, as GPTQ and compressed-tensors directories and as GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.gguf_model import add_sizes, add_word_tokens, tensors, write

if TYPE_CHECKING:
    import torch

GROUP = 128
GGUF_KINDS = {"gguf-q8_0": ("Q8_0", "Q8_0"), "gguf-q4_k": ("Q4_K", "Q5_0")}
"""Types of a file's matrices: the first one, or the second if the columns are no multiple of its blocks' size. Tools of
llama.cpp choose in the same way."""
KINDS = ("gptq", "w8a8", *GGUF_KINDS)


def make_stored(kind: str, checkpoint: Path) -> Path:
    """Return the copy of `checkpoint` in a format of `KINDS`, which is made unless it exists beside it."""
    path = checkpoint.with_name(f"{checkpoint.name}-{kind}")
    if kind in GGUF_KINDS:
        path = path.with_name(f"{path.name}.gguf")
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        make = _make_gguf if kind in GGUF_KINDS else _make_directory
        make(kind, checkpoint, partial)
        partial.rename(path)
    return path


def _make_gguf(kind: str, checkpoint: Path, path: Path) -> None:
    """Write random blocks: the `gguf` package does not quantize to K types, and speed does not depend on values."""
    import gguf
    import numpy as np

    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, config["model_type"])
    add_sizes(writer, config)
    add_word_tokens(writer, config)
    rng = np.random.default_rng(0)
    for name, values in tensors(checkpoint / "model.safetensors"):
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        type_name, fallback = GGUF_KINDS[kind]
        if values.shape[1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][0]:
            type_name = fallback
        quantization = gguf.GGMLQuantizationType[type_name]
        if type_name != "Q4_K":
            blocks = gguf.quants.quantize(values, quantization)
        else:
            size, size_bytes = gguf.GGML_QUANT_SIZES[quantization]
            shape = (len(values), values.shape[1] // size, size_bytes)
            blocks = rng.integers(0, 256, shape, dtype=np.uint8)
            scales = np.array([4e-5, 3e-4], dtype=np.float16).view(np.uint8)
            blocks[..., :4] = scales
            blocks = blocks.reshape(len(values), -1)
        writer.add_tensor(name, blocks, raw_dtype=quantization)
    write(writer)


def _make_directory(kind: str, checkpoint: Path, path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = _gptq_config() if kind == "gptq" else _w8a8_config()
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((checkpoint / name).read_bytes())
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and module.endswith("_proj"):
            pack = _gptq if kind == "gptq" else _w8a8
            stored |= {f"{module}.{part}": value for part, value in pack(tensor).items()}
        else:
            stored[name] = tensor
    save_file(stored, path / "model.safetensors", {"format": "pt"})


def _gptq_config() -> dict[str, object]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
    }


def _gptq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Round a matrix [N, K] to four bits, symmetric, in groups of `GROUP` columns."""
    import torch

    outs, cols = weight.shape
    groups = weight.float().view(outs, cols // GROUP, GROUP)
    scales = (groups.abs().amax(2) / 7).half()
    codes = ((groups / scales.float().unsqueeze(2)).round() + 8).clamp(0, 15)
    shifts = torch.arange(0, 32, 4)

    def pack(values: torch.Tensor) -> torch.Tensor:
        """Pack the last dimension into words of eight."""
        words = (values.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)
        return torch.where(words >= 2**31, words - 2**32, words).int()

    zeros = torch.full((cols // GROUP, outs), 7)
    return {
        "qweight": pack(codes.view(outs, cols)).T.contiguous(),
        "qzeros": pack(zeros),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(cols) // GROUP).int(),
    }


def _w8a8_config() -> dict[str, object]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = weights | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "quantization_status": "compressed",
    }


def _w8a8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Round a matrix [N, K] to eight bits, symmetric, by rows."""
    import torch

    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return {
        "weight": (weight.float() / scales).round().to(torch.int8),
        "weight_scale": scales.bfloat16(),
    }
