"""Corrections of Triton's interpreter, whose arithmetic differs from that of a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

_TORCH_DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}


def install() -> None:
    """Patch the interpreter's conversions, matrix products and function calls.

    The original interpreter truncates float32 to bfloat16, takes integers as the bits of bfloat16 numbers, and
    multiplies such bits as integers. After the patch, conversions round to nearest, ties to even, and matrices of any
    float type are multiplied. Calls of a kernel's functions no longer patch the language each time, which is slow and
    which the launch has done already.
    """
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_si_to_fp = _convert_integers
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpretedFunction.__call__ = _call


def _read(data: NDArray[Any], dtype: Any) -> torch.Tensor:
    flat = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
    return flat.view(_TORCH_DTYPES[dtype.scalar]).reshape(data.shape)


def _convert(data: NDArray[Any], source: Any, target: Any, rounding: Any) -> NDArray[Any]:
    converted = _read(data, source).float().to(_TORCH_DTYPES[target.scalar]).contiguous()
    bits = np.dtype(f"uint{target.scalar.primitive_bitwidth}")
    return converted.reshape(-1).view(torch.uint8).numpy().view(bits).reshape(data.shape)


def _convert_integers(builder: Any, source: Any, target: Any) -> Any:
    """Return integers as floating-point numbers."""
    if target.scalar != tl.bfloat16:
        return builder.cast_impl(source, target)
    return builder.cast_impl(builder.cast_impl(source, tl.float32), target)


def _dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """Return d + a @ b, summed column by column of `a`, so that the order does not depend on the shape."""
    left, right = (_read(x.data, x.dtype).float() for x in (a, b))
    total = torch.from_numpy(np.array(d.data, dtype=np.float32))
    for k in range(left.shape[1]):
        total.addcmul_(left[:, k : k + 1], right[k : k + 1])
    return interpreter.TensorHandle(total.numpy(), d.dtype.scalar)


_patched_modules: set[int] = set()


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    module_id = id(function.fn.__globals__)
    if module_id not in _patched_modules:
        _patched_modules.add(module_id)
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)
