"""Arithmetic identity of a loaded model: the parts that decide the bytes of its outputs."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from argosy.engine.engine_config import WeightFormat
from argosy.engine.execution.architectures.architecture import GenericArchitecture
from argosy.engine.execution.architectures.decoder import ModelArchitecture
from argosy.engine.execution.architectures.encoder import EncoderArchitecture
from argosy.engine.execution.checkpoint_formats.checkpoint import checkpoint_digest
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.rope import rope_frequencies
from argosy.engine.execution.loading.model_selection import AnyArchitecture
from argosy.protocol import ArithmeticIdentity

SOURCE_FOLDER = Path(__file__).parents[1]
"""Folder with all code that computes: kernels, layers and samplers."""
SOURCE_SUFFIXES = frozenset({".py", ".cpp", ".h"})
DIGEST_CHARS = 12
"""Length of the digests of parts, which people compare."""


def describe_arithmetic(
    path: Path,
    architecture: AnyArchitecture,
    device: Device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    quantize: WeightFormat | None,
    *,
    attention: str,
    stored_format: str | None = None,
) -> ArithmeticIdentity:
    """Return the arithmetic identity of a checkpoint that is loaded with these formats on this device.

    `attention` is the name of the attention backend, which depends on the size of the KV blocks. `stored_format`
    describes the checkpoint's own integers if the kernels compute with them.
    """
    versions = f"torch {torch.__version__} {device.kernel_compiler}".rstrip()
    if isinstance(architecture, GenericArchitecture):
        rope = architecture.rope
        versions += f" transformers {version('transformers')}"
    else:
        rope = _describe_ropes(architecture)
    return ArithmeticIdentity(
        weights=checkpoint_digest(path),
        dtype=_dtype_name(dtype),
        quantization=quantize or stored_format or "none",
        kv_dtype=_dtype_name(kv_dtype),
        kernels=f"{source_digest()} {versions} attention {attention}",
        instruction_set=device.instruction_set(dtype, quantize),
        rope=rope,
    )


@cache
def source_digest() -> str:
    """Return a digest of the code that computes.

    The digest covers the whole folder, because a change of any layer's order of operations may change a byte.
    """
    digest = hashlib.sha256()
    for source in sorted(SOURCE_FOLDER.rglob("*")):
        if source.suffix in SOURCE_SUFFIXES:
            name = source.relative_to(SOURCE_FOLDER).as_posix()
            digest.update(name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:DIGEST_CHARS]


def _describe_ropes(architecture: ModelArchitecture | EncoderArchitecture) -> str:
    """Return the kinds of the ropes and a digest of their frequencies.

    The frequencies may depend on the context length to which the model is limited.
    """
    if not architecture.ropes:
        return "none"
    digest = hashlib.sha256()
    for rope in architecture.ropes:
        frequencies = rope_frequencies(rope, architecture.max_model_len)
        digest.update(frequencies.numpy().tobytes() + f"{rope.attention_factor!r}".encode())
    kinds = "+".join(rope.kind for rope in architecture.ropes)
    return f"{kinds} {digest.hexdigest()[:DIGEST_CHARS]}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
