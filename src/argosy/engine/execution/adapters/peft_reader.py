"""Reader of an adapter's folder in PEFT's format: its settings, and its tensors by the module that they belong to."""

from __future__ import annotations

import re
import stat
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from argosy.engine.execution.adapters.peft_config import (
    AdapterError,
    PeftConfig,
    parse_peft_config,
)
from argosy.engine.execution.checkpoint_formats.checkpoint import read_tensor_names
from argosy.engine.execution.checkpoint_formats.tensor_sources import SafetensorsSource
from argosy.engine.execution.config.checkpoint_config import read_json

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 4 << 20
MAX_TENSORS = 10_000
TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 64 << 20
_MAX_HEADER_BYTES = 16 << 20
_FLOAT_DTYPES = {torch.float32, torch.float16, torch.bfloat16}
_TENSOR_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+?)(?P<wrapped>\.base_layer)?\.(?P<kind>"
    r"lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector(?:\.weight)?|token_adapter\.trainable_tokens_delta|weight)"
)
_KINDS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_B.bias": "bias",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "token_adapter.trainable_tokens_delta": "token_rows",
    "weight": "table",
}


@dataclass(slots=True)
class ModuleTensors:
    """Tensors of one module, as they are stored."""

    path: str
    """Path of the module in the model that was trained."""
    a: Tensor | None = None
    """[ranks, K]."""
    b: Tensor | None = None
    """[N, ranks]."""
    bias: Tensor | None = None
    """[N], bias of B."""
    magnitude: Tensor | None = None
    """[N], norms of DoRA."""
    table: Tensor | None = None
    """[V, hidden], the whole matrix."""
    token_rows: Tensor | None = None
    """[n, hidden], rows of some tokens."""
    base: Tensor | None = None
    """[V, hidden], matrix of the base model, which PEFT stores beside its update of embedding or head."""


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """Adapter as it is stored."""

    config: PeftConfig
    modules: dict[str, ModuleTensors] = field(default_factory=dict)
    """Name of a module without the prefix of its family, such as `layers.0.self_attn.q_proj` -> its tensors."""


def read_adapter(folder: Path, prefixes: Collection[str]) -> StoredAdapter:
    """Read and check an adapter. Tensors are mapped.

    Args:
        folder: Folder with adapter_config.json and adapter_model.safetensors.
        prefixes: Prefixes of the names of a decoder's modules in the model family.

    Raises:
        ValueError: A file is missing or damaged, or a field or tensor is not honoured. The message names it.
        OSError: A file cannot be read.
    """
    config_file = _find_file(folder, CONFIG_FILE, MAX_CONFIG_BYTES)
    config = parse_peft_config(read_json(config_file))
    return StoredAdapter(config, _read_tensors(folder, prefixes))


def _find_file(folder: Path, name: str, max_bytes: int | None = None) -> Path:
    """Return a file of the folder.

    A symbolic link may lead within the folder, or to a store's blobs.

    Raises:
        AdapterError: There is no such file, it leads elsewhere, or it is too large.
    """
    file = (folder / name).resolve()
    if file.parent != folder.resolve() and file.parent.name != "blobs":
        raise AdapterError(f"{name} is a link out of the folder; copy the file into it")
    try:
        state = file.stat()
    except OSError as error:
        raise AdapterError(
            f"there is no file {name}; give a folder that PEFT's save_pretrained wrote, with safetensors"
        ) from error
    if not stat.S_ISREG(state.st_mode):
        raise AdapterError(f"{name} is not a regular file")
    if max_bytes is not None and state.st_size > max_bytes:
        raise AdapterError(f"{name} has {state.st_size} bytes, more than {max_bytes}")
    return file


def check_tokenizer(folder: Path, base: Path) -> None:
    """Check that the tokens of an adapter's tokenizer.json, if it has one, are those of its base.

    Raises:
        ValueError: The tokens differ, or the file is damaged.
    """
    if not (folder / TOKENIZER_FILE).exists() or not (base / TOKENIZER_FILE).is_file():
        return
    files = _find_file(folder, TOKENIZER_FILE, MAX_TOKENIZER_BYTES), base / TOKENIZER_FILE
    contents = [file.read_bytes() for file in files]
    if contents[0] != contents[1] and _read_tokens(files[0]) != _read_tokens(files[1]):
        raise AdapterError(
            f"{TOKENIZER_FILE} has other tokens than the base; an adapter cannot change the vocabulary"
        )


def _read_tokens(file: Path) -> tuple[object, object]:
    """Return the vocabulary of a tokenizer, and its added tokens."""
    values = read_json(file)
    model, added = values.get("model"), values.get("added_tokens")
    if not isinstance(model, dict) or not isinstance(added, list):
        raise AdapterError(f"{file.name} has no model or added_tokens")
    tokens = {str(each.get("content")): each.get("id") for each in added if isinstance(each, dict)}
    return model.get("vocab"), tokens


def _read_tensors(folder: Path, prefixes: Collection[str]) -> dict[str, ModuleTensors]:
    others = sorted(
        file.name for file in folder.glob("adapter_model*.safetensors*") if file.name != TENSOR_FILE
    )
    if others:
        raise AdapterError(
            f"there are tensors in {others[0][:80]} beside {TENSOR_FILE}; save the adapter in one file"
        )
    file = _find_file(folder, TENSOR_FILE)
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise AdapterError(f"the header of {TENSOR_FILE} has {header_bytes} bytes")
    names = read_tensor_names(file)
    if len(names) > MAX_TENSORS:
        raise AdapterError(f"{TENSOR_FILE} has {len(names)} tensors, more than {MAX_TENSORS}")
    source = SafetensorsSource(dict.fromkeys(names, file))
    modules: dict[str, ModuleTensors] = {}
    for name in names:
        match = _TENSOR_NAME.fullmatch(name)
        if match is None:
            raise AdapterError(f"{TENSOR_FILE} has the tensor {name[:200]!r}, which is not known")
        if source.dtype(name) not in _FLOAT_DTYPES:
            raise AdapterError(f"{name} is stored as {source.dtype(name)}; use floats")
        tensor = source.read(name)
        if not tensor.numel() or not is_finite(tensor):
            raise AdapterError(
                f"{name} is empty or has values that are not finite (NaN or infinity)"
            )
        path = match["module"]
        module = modules.setdefault(strip_prefix(path, prefixes), ModuleTensors(path))
        kind = _KINDS[match["kind"]]
        if match["wrapped"] and kind == "table":
            kind = "base"
        if module.path != path or getattr(module, kind) is not None:
            raise AdapterError(f"{name} is stored twice, under different names")
        setattr(module, kind, tensor)
    return modules


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite. A finite sum shows it in one pass, and only an infinite one may not."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def strip_prefix(path: str, prefixes: Collection[str]) -> str:
    """Return the path of a module without the prefix of its family's decoder, or of its head."""
    heads = (f"{prefix.removesuffix('model.')}lm_head" for prefix in prefixes)
    if path in heads:
        return "lm_head"
    for prefix in sorted(prefixes, key=len, reverse=True):
        if prefix and path.startswith(prefix):
            return path.removeprefix(prefix)
    return path
