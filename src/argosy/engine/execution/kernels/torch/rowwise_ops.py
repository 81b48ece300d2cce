"""Torch functions whose results depend only on their own row, in place of functions that treat rows differently.

Torch's fused activations compute the last elements of an array with other instructions than the rest. Matrix products
choose their kernel by the number of rows. In both cases the result of a token would depend on the other tokens of the
batch. A model that transformers implements calls such functions. `InexactCallRecorder` finds the modules that call
them, and `use_rowwise_ops` replaces the functions while one of these modules runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

TILE_ROWS = 16
"""Number of rows of every matrix product with an unpacked weight."""


class RowwiseOps(TorchFunctionMode):
    """Torch function mode that replaces inexact functions by row-wise ones."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - the result of any torch function
        del types
        function: Callable[..., Any] = ROWWISE_FUNCTIONS.get(func, func)
        return function(*args, **(kwargs or {}))


def use_rowwise_ops(module: nn.Module) -> None:
    """Replace inexact functions while `module.forward` runs."""
    forward = module.forward

    @functools.wraps(forward)
    def forward_rowwise(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - arguments of any module
        with RowwiseOps():
            return forward(*args, **kwargs)

    module.forward = forward_rowwise


class InexactCallRecorder(TorchFunctionMode):
    """Torch function mode that records which module calls inexact functions directly."""

    def __init__(self, exempt: Callable[[nn.Module], bool]) -> None:
        """Modules for which `exempt` returns True are not recorded."""
        super().__init__()
        self.modules: list[nn.Module] = []
        """Modules whose inexact functions all have a replacement, in the order of their first call."""
        self.visited: dict[nn.Module, None] = {}
        """All modules that ran, in the order of their first call."""
        self.unreplaced: set[str] = set()
        """Names of called functions that may be inexact and have no replacement."""
        self._exempt = exempt
        self._stack: list[nn.Module] = []

    def __enter__(self) -> Self:
        def push(module: nn.Module, args: object) -> None:
            del args
            self.visited[module] = None
            self._stack.append(module)

        def pop(module: nn.Module, args: object, output: object) -> None:
            del module, args, output
            self._stack.pop()

        self._hooks = [
            register_module_forward_pre_hook(push),
            register_module_forward_hook(pop),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - the result of any torch function
        del types
        module = self._stack[-1] if self._stack else None
        if module is not None and not self._exempt(module):
            if func in ROWWISE_FUNCTIONS and not _is_exact(func, args):
                if module not in self.modules:
                    self.modules.append(module)
            elif func in UNREPLACED_FUNCTIONS:
                self.unreplaced.add(f"{UNREPLACED_FUNCTIONS[func]} in {type(module).__name__}")
        return func(*args, **(kwargs or {}))


def _is_exact(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether a call treats all rows alike: a product without a sum, or a square root in float32."""
    if func in _MATRIX_PRODUCTS:
        return bool(args[0].shape[-1] == 1)
    return func in _SQUARE_ROOTS and args[0].dtype == torch.float32


def rowwise_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map x [..., K] to x @ weight.T + bias with products that all have `TILE_ROWS` rows."""
    rows = x.reshape(-1, x.shape[-1])
    tiles = F.pad(rows, (0, 0, 0, -len(rows) % TILE_ROWS)).split(TILE_ROWS)
    outputs = [F.linear(tile, weight, bias) for tile in tiles]
    out = torch.cat(outputs)[: len(rows)] if outputs else F.linear(rows, weight, bias)
    return out.view(*x.shape[:-1], out.shape[-1])


def _matmul(x: Tensor, other: Tensor) -> Tensor:
    if other.dim() == 2 and x.dim() >= 2:  # rows of tokens times a weight
        return rowwise_linear(x, other.mT)
    return torch.matmul(x, other)


def _in_float32(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Wrap a function of float32 so that it takes and returns any dtype."""

    @functools.wraps(function)
    def compute(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - as torch passes them
        kwargs.pop("inplace", None)
        return function(x.float(), *args, **kwargs).to(x.dtype)

    return compute


def _sigmoid(x: Tensor) -> Tensor:
    return x.neg().exp_().add_(1.0).reciprocal_()


def silu(x: Tensor, inplace: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - torch's signature
    """Compute SiLU, x * sigmoid(x) (Elfwing et al. 2017)."""
    del inplace
    return x / x.neg().exp_().add_(1.0)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute GELU (Hendrycks & Gimpel 2016)."""
    if approximate == "tanh":
        inner = (x * x).mul_(0.044715).add_(1.0).mul_(x).mul_(math.sqrt(2 / math.pi))
        return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)
    return (x * math.sqrt(0.5)).erf_().add_(1.0).mul_(x).mul_(0.5)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, scaled.clamp(max=threshold).exp().log1p() / beta)


def _mish(x: Tensor, inplace: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - torch's signature
    del inplace
    return x * _softplus(x).tanh()


def _elu(x: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - torch's signature
    del inplace
    return torch.where(x > 0, x, x.clamp(max=0.0).expm1() * alpha)


def _rsqrt(x: Tensor) -> Tensor:
    return x.rsqrt()


_SQUARE_ROOTS = (torch.rsqrt, torch.Tensor.rsqrt)
_MATRIX_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    F.linear: rowwise_linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    torch.Tensor.mm: _matmul,
}
ROWWISE_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    **_MATRIX_PRODUCTS,
    **dict.fromkeys(
        (torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid, torch.special.expit), _in_float32(_sigmoid)
    ),
    F.silu: _in_float32(silu),
    F.gelu: _in_float32(gelu),
    F.softplus: _in_float32(_softplus),
    F.mish: _in_float32(_mish),
    F.elu: _in_float32(_elu),
    **dict.fromkeys(_SQUARE_ROOTS, _in_float32(_rsqrt)),
}
"""Torch function -> function with the same meaning that treats all rows alike."""
UNREPLACED_FUNCTIONS: dict[Any, str] = {
    torch.bmm: "bmm",
    torch.Tensor.bmm: "bmm",
    torch.baddbmm: "baddbmm",
    torch.addmm: "addmm",
    torch.einsum: "einsum",
    torch.logaddexp: "logaddexp",
    F.conv1d: "conv1d",
    F.scaled_dot_product_attention: "scaled_dot_product_attention",
}
"""Torch functions that may treat rows differently and are not replaced, with their names."""
