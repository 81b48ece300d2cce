"""Writer of a compressed-tensors checkpoint, shard by shard, which appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from argosy.engine.execution.checkpoint_formats.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
)
from argosy.engine.execution.config.checkpoint_config import read_json
from argosy.engine.quantization.weight_rounding import Recipe, RoundedWeight
from argosy.model_store import list_model_files

SHARD_BYTES = 1 << 30
"""Bytes of tensors that are kept in memory before they are written."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json")
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_WORD_CODES = 8


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a folder beside `target` that becomes it at the end of the context, or is removed after an error.

    What a killed process has left of the same target is removed first.

    Raises:
        ValueError: The target exists, another process writes it, or the folder cannot be written. The message names it.
    """
    if target.exists():
        raise ValueError(f"{target} exists; remove it, or give another --output")
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise ValueError(f"another process writes {target}; wait for it") from error
        try:
            _clear(partial)
            yield partial
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            os.close(lock)
    except (OSError, SafetensorError) as error:
        raise ValueError(_explain(error, target)) from error


class CheckpointWriter:
    """Writer of the tensors and other files of a quantized checkpoint into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a stored tensor.

        Raises:
            OSError, SafetensorError: A shard cannot be written.
        """
        self._pending[name] = tensor.detach().contiguous()
        self._pending_bytes += tensor.nbytes
        if self._pending_bytes >= SHARD_BYTES:
            self._write_shard()

    def add_rounded(self, name: str, weight: RoundedWeight) -> None:
        """Add the stored tensors of a matrix whose name in full precision ends with `.weight`."""
        prefix = name.removesuffix(".weight")
        if weight.bits == 8:
            self.add(name, weight.codes)
            self.add(f"{prefix}.weight_scale", weight.scales)
            return
        self.add(f"{prefix}.weight_packed", pack_codes(weight.codes))
        self.add(f"{prefix}.weight_scale", weight.scales.bfloat16())
        self.add(f"{prefix}.weight_shape", torch.tensor(weight.codes.shape))

    def finish(self, model: Path, recipe: Recipe, ignored: list[str]) -> None:
        """Write what is left: the last shard, the index, config.json and the other files of the model.

        Raises:
            OSError, SafetensorError: A file cannot be written.
        """
        if self._pending:
            self._write_shard()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            file = f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else SINGLE_FILE
            self._shard(number).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            self._write_json(INDEX_FILE, index)
        config = read_json(model / CONFIG_FILE)
        config["quantization_config"] = describe_recipe(recipe, ignored)
        self._write_json(CONFIG_FILE, config)
        for name, source in list_model_files(model).items():
            if name != CONFIG_FILE and not name.endswith(_WEIGHT_SUFFIXES):
                (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, self._folder / name)

    def _write_shard(self) -> None:
        self._shards.append(list(self._pending))
        save_file(self._pending, self._shard(len(self._shards)), metadata={"format": "pt"})
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _shard(self, number: int) -> Path:
        return self._folder / f"shard-{number:05}.safetensors"

    def _write_json(self, name: str, values: dict[str, Any]) -> None:
        (self._folder / name).write_text(json.dumps(values, indent=2) + "\n")


def describe_recipe(recipe: Recipe, ignored: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of config.json. `ignored` are the linear layers that are not quantized.

    Four bits have no `input_activations`, since vLLM then computes with full-precision inputs on all devices.
    """
    weights: dict[str, Any] = {"num_bits": recipe.bits, "type": "int", "symmetric": True}
    inputs = None
    if recipe.group_size is None:
        weights["strategy"] = "channel"
        inputs = {**weights, "strategy": "token", "dynamic": True}
    else:
        weights |= {"strategy": "group", "group_size": recipe.group_size}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if recipe.bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }


def pack_codes(codes: Tensor) -> Tensor:
    """Pack codes -8..7 [N, K] to words of eight, lowest bits first, [N, K / 8] int32."""
    nibbles = (codes.int() + 8).unflatten(1, (-1, _WORD_CODES))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return torch.sum(nibbles << shifts, -1, dtype=torch.int32)


def _clear(folder: Path) -> None:
    for left in folder.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def _explain(error: OSError | SafetensorError, target: Path) -> str:
    number = error.errno if isinstance(error, OSError) else None
    is_full = number in _NO_SPACE or any(
        f"os error {each}" in str(error) or f"code: {each}," in str(error) for each in _NO_SPACE
    )
    if is_full:
        return f"cannot write {target}: the disk is full; free space, or give an --output on a larger disk"
    return f"cannot write {target}: {error}; check the folder's permissions"
