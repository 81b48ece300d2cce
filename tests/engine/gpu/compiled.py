"""Compiles the kernels for Hopper at the shapes of real models, without a GPU; prints what each takes.

Run by test_compiled.py in a process of its own, since here Triton must compile what the other tests
let it interpret. One line of JSON a kernel: its name, registers, spilled bytes, shared memory.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)


def compiled(
    label: str,
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
    floats: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Compile `kernel`; parameters that are neither pointers, floats nor constants are int32."""
    signature = {}
    attributes = {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = pointers[name]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif name in floats:
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if "stride" in name:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(source, target=HOPPER, options=options)
    return {
        "kernel": label,
        "shared": built.metadata.shared,
        "ptx": built.asm["ptx"],
        "cubin": built.asm["cubin"],
        "ttgir": built.asm["ttgir"],
    }
