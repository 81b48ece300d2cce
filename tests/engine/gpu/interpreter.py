"""Makes Triton's interpreter compute as a GPU does where its own arithmetic is another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}


def install() -> None:
    """Conversions round to nearest, ties to even, and matrices of any float type multiply.

    As it comes, the interpreter cuts float32 to bfloat16 off and multiplies the bits of bfloat16
    numbers as if they were integers. A kernel's own functions are also called without preparing the
    language anew each time, which the launch has done: it is most of what a test would wait for.
    """
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpretedFunction.__call__ = _call


def _read(data: NDArray[Any], dtype: Any) -> torch.Tensor:
    flat = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
    return flat.view(_TORCH[dtype.scalar]).reshape(data.shape)


def _convert(data: NDArray[Any], source: Any, target: Any, rounding: Any) -> NDArray[Any]:
    found = _read(data, source).float().to(_TORCH[target.scalar]).contiguous()
    bits = np.dtype(f"uint{target.scalar.primitive_bitwidth}")
    return found.reshape(-1).view(torch.uint8).numpy().view(bits).reshape(data.shape)


def _dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """The sum of d and a @ b, one column of `a` after the other: an element's sum is blind to the shape around it."""
    left, right = (_read(x.data, x.dtype).float() for x in (a, b))
    total = torch.from_numpy(np.array(d.data, dtype=np.float32))
    for k in range(left.shape[1]):
        total.addcmul_(left[:, k : k + 1], right[k : k + 1])
    return interpreter.TensorHandle(total.numpy(), d.dtype.scalar)


_prepared: set[int] = set()


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    home = id(function.fn.__globals__)
    if home not in _prepared:
        _prepared.add(home)
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)
