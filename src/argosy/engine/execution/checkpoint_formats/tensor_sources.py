"""Sources of stored tensors: safetensors files, and the zip archives that torch.save writes."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from argosy.engine.execution.checkpoint_formats.checkpoint import tensor_files, torch_archives
from argosy.engine.execution.checkpoint_formats.encoded import TensorSource

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_ARCHIVE_FILES = 1_000_000


def open_tensor_source(path: Path) -> TensorSource:
    """Open the tensor files of a checkpoint directory. safetensors files are preferred.

    Raises:
        ValueError: There are none, or a file is damaged. The message names it.
    """
    archives = torch_archives(path)
    return SafetensorsSource(tensor_files(path)) if archives is None else TorchSource(archives)


class SafetensorsSource:
    """Tensors of safetensors files, which are memory-mapped and read on use."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files
        self._open_files: dict[Path, Any] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        try:
            return tuple(self._open(name).get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise self._error(name, error) from error

    def dtype(self, name: str) -> torch.dtype:
        try:
            stored: str = self._open(name).get_slice(name).get_dtype()
        except (SafetensorError, OSError) as error:
            raise self._error(name, error) from error
        if stored not in _DTYPES:
            raise ValueError(
                f"{self.files[name]}: {name} is stored as {stored}; "
                "use a checkpoint in float16, bfloat16 or float32"
            )
        return _DTYPES[stored]

    def read(self, name: str, entry: int | None = None) -> Tensor:
        try:
            handle = self._open(name)
            tensor: Tensor = (
                handle.get_tensor(name) if entry is None else handle.get_slice(name)[entry]
            )
        except (SafetensorError, OSError, IndexError) as error:
            raise self._error(name, error) from error
        return tensor

    def _open(self, name: str) -> Any:  # noqa: ANN401 - the library is untyped
        file = _find_file(self.files, name)
        if file not in self._open_files:
            self._open_files[file] = safe_open(file, framework="pt")
        return self._open_files[file]

    def _error(self, name: str, error: Exception) -> ValueError:
        return ValueError(
            f"cannot read {name} from {self.files[name]}: {error}; the file is damaged, fetch it again"
        )


class TorchSource:
    """Tensors of archives that torch.save wrote, which are mapped, and unpickled by torch's weights-only loader."""

    def __init__(self, archives: Mapping[str, Path] | Path) -> None:
        """Open the archive, or take the file of each tensor from an index.

        Raises:
            ValueError: The archive is damaged or has other contents than tensors.
        """
        self._tensors: dict[Path, dict[str, Tensor]] = {}
        self.files: Mapping[str, Path] = (
            dict.fromkeys(self._load(archives), archives)
            if isinstance(archives, Path)
            else archives
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._find(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._find(name).dtype

    def read(self, name: str, entry: int | None = None) -> Tensor:
        tensor = self._find(name)
        if entry is None:
            return tensor
        if not 0 <= entry < (tensor.shape[0] if tensor.dim() else 0):
            raise ValueError(
                f"{self.files[name]}: {name} has shape {list(tensor.shape)} and no entry {entry}; "
                "config.json and the weights belong to different models"
            )
        return tensor[entry]

    def _find(self, name: str) -> Tensor:
        file = _find_file(self.files, name)
        tensors = self._load(file)
        if name not in tensors:
            raise ValueError(
                f"cannot read {name} from {file}: it has no such tensor; the file is damaged, fetch it again"
            )
        return tensors[name]

    def _load(self, file: Path) -> dict[str, Tensor]:
        if file not in self._tensors:
            self._tensors[file] = _load_archive(file)
        return self._tensors[file]


def _find_file(files: Mapping[str, Path], name: str) -> Path:
    """Return the file of a tensor.

    Raises:
        ValueError: There is no such tensor.
    """
    if name not in files:
        raise ValueError(f"the checkpoint has no tensor {name}; the download is incomplete")
    return files[name]


def _load_archive(file: Path) -> dict[str, Tensor]:
    """Map the tensors of an archive, without running code of its pickle.

    Raises:
        ValueError: The archive is damaged, compressed, or has other contents than tensors.
    """
    remedy = "fetch it again, or use the model's safetensors files"
    _check_archive(file, remedy)
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch's unpickler raises anything
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ValueError(
            f"{file} cannot be loaded as tensors only ({reason}); nothing of it was run. Do not trust it; {remedy}"
        ) from error
    if not isinstance(tensors, dict):
        raise ValueError(  # noqa: TRY004 - the file is wrong, not a type
            f"{file} holds a {type(tensors).__name__} instead of tensors by name; {remedy}"
        )
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(  # noqa: TRY004 - the same
                f"{file}: {str(name)[:80]!r} is a {type(tensor).__name__} instead of a tensor; {remedy}"
            )
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise ValueError(
                f"{file}: {name[:80]} is not a plain tensor of numbers ({tensor.layout}, {tensor.device}); {remedy}"
            )
    return tensors


def _check_archive(file: Path, remedy: str) -> None:
    """Check that a file is an uncompressed zip archive, whose contents are not larger than itself.

    Raises:
        ValueError: It is not.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"cannot read {file}: it is not a zip archive of a current torch.save ({error}); {remedy}"
        ) from error
    size = file.stat().st_size
    if len({entry.filename for entry in entries}) < len(entries):
        raise ValueError(f"{file} has two members with the same name; {remedy}")
    if (
        len(entries) > _MAX_ARCHIVE_FILES
        or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        or sum(entry.file_size for entry in entries) > size
    ):
        raise ValueError(
            f"{file} is compressed, or its contents are larger than itself, as torch.save never writes it; {remedy}"
        )
