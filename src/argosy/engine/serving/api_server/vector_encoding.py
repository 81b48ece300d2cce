"""Encoding of vectors: JSON lists of numbers, or the bytes of the numbers in base64."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from argosy.protocol import EmbedDType, Endianness

_encode = msgspec.json.Encoder().encode


def encode_vector(vector: NDArray[np.float32]) -> Raw:
    """Encode a vector, or a matrix, as JSON lists of numbers."""
    return Raw(_encode(vector.tolist()))


def encode_vector_bytes(
    vector: NDArray[np.float32], dtype: EmbedDType = "float32", endianness: Endianness = "native"
) -> Raw:
    """Encode the bytes of a vector as a JSON string in base64, little-endian unless `endianness` is `big`."""
    order = ">" if endianness == "big" else "<"
    numbers: NDArray[Any]
    match dtype:
        case "float32":
            numbers = vector.astype(order + "f4")
        case "float16":
            numbers = vector.astype(order + "f2")
        case "bfloat16":
            numbers = _round_to_bfloat16(vector).astype(order + "u2")
    return Raw(b'"' + b64encode(numbers.tobytes()) + b'"')


def _round_to_bfloat16(vector: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the upper halves of the numbers' bits, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(vector, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
