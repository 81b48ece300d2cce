"""Memory for the hidden states of all calibration tokens: the process's own, or a file if it is large."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor

MAX_MEMORY_BYTES = 256 << 20
"""Size above which hidden states are mapped from a file."""


def allocate_states(shape: Sequence[int], dtype: torch.dtype, folder: Path) -> Tensor:
    """Allocate a tensor. A large one is mapped from a file in `folder` that has no name and ends with the tensor.

    Raises:
        OSError: The file cannot be written.
    """
    count = math.prod(shape)
    num_bytes = count * dtype.itemsize
    if num_bytes <= MAX_MEMORY_BYTES:
        return torch.empty(*shape, dtype=dtype)
    with NamedTemporaryFile(dir=folder) as file:
        # reserves the blocks: a full disk is an error here, and would be a signal at a write to the mapping
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        mapped = torch.from_file(file.name, shared=True, size=count, dtype=dtype)
    return mapped.view(*shape)
