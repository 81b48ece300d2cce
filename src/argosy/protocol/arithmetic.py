"""Arithmetic identity of a replica: everything besides the request that decides the bytes of an output."""

from __future__ import annotations

import hashlib

import msgspec

ARITHMETIC_ID_CHARS = 32
"""Length of `ArithmeticIdentity.id` in hexadecimal digits."""


class ArithmeticIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the arithmetic identity. Replicas with equal identities compute the same bytes for the same request.

    Threads, batch size, chunking, prefix hits and speculation are not part of it, since they do not change a byte.
    """

    weights: str
    """Digest of the checkpoint's files."""
    dtype: str
    """Data type of weights and activations, such as `bfloat16`."""
    quantization: str
    """Format to which the weights are rounded, or `none`."""
    kv_dtype: str
    """Data type of cached keys and values."""
    kernels: str
    """Digest of the engine's own computation code, and the versions of torch and of the compiler."""
    instruction_set: str
    """Instruction sets that the CPU kernels and torch use, or the compute capability of the GPU."""
    rope: str
    """Kind of the rotary embedding, and a digest of its frequencies."""
    tokenization: str = ""
    """Digest of the tokenizer and the chat template in use. Empty before they are loaded."""

    @property
    def id(self) -> str:
        """Short hash of all parts, by which identities are compared."""
        parts = msgspec.json.encode(msgspec.structs.astuple(self))
        return hashlib.sha256(parts).hexdigest()[:ARITHMETIC_ID_CHARS]


def differing_parts(identities: list[ArithmeticIdentity]) -> dict[str, list[str]]:
    """Return the parts in which the identities differ, each with its different values in sorted order."""
    values = {
        name: sorted({getattr(identity, name) for identity in identities})
        for name in ArithmeticIdentity.__struct_fields__
    }
    return {name: different for name, different in values.items() if len(different) > 1}
