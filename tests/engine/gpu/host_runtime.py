"""A runtime without a GPU: host tensors, and graphs that check that nothing but numbers changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from argosy.engine.execution.device import CapturedGraph, DeviceEvent, HostEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Tape(TorchDispatchMode):
    """What a piece of work does: operations, kernels, the shapes they see, and where what they did not make lies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.steps: list[tuple[Any, ...]] = []
        self._made: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.steps.append((str(func), *map(self._seen, tree_leaves((args, kwargs)))))
        given = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(given):
            if isinstance(leaf, torch.Tensor) and not self._given(leaf, args):
                self._made.add(leaf.untyped_storage().data_ptr())
        return given

    def _seen(self, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return str(leaf)
        here = leaf.untyped_storage().data_ptr()
        return (tuple(leaf.shape), leaf.stride(), "made" if here in self._made else leaf.data_ptr())

    def kernel(self, launch: Callable[..., None]) -> Callable[..., None]:
        """`GridExecutor.__call__`, with the launch taken down and what the interpreter does for it left out."""

        def call(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            name = executor.fn.__name__
            leaves = tree_leaves((executor.grid, args, kwargs))
            self.steps.append((name, *map(self._seen, leaves)))
            with _disable_current_modes():
                launch(executor, *args, **kwargs)

        return call

    @staticmethod
    def _given(leaf: Tensor, args: tuple[Any, ...]) -> bool:
        """Whether it is a view of an argument, or one itself."""
        storages = [
            arg.untyped_storage().data_ptr()
            for arg in tree_leaves(args)
            if isinstance(arg, torch.Tensor)
        ]
        return leaf.untyped_storage().data_ptr() in storages


def taped(work: Callable[[], object]) -> list[tuple[Any, ...]]:
    """Do `work`; what it did."""
    tape = Tape()
    with mock.patch.object(GridExecutor, "__call__", tape.kernel(GridExecutor.__call__)), tape:
        work()
    return tape.steps


@dataclass
class Replayed:
    """A graph that does its work again, and makes sure that a recording would have done the same."""

    work: Callable[[], object]
    steps: list[tuple[Any, ...]]
    replays: int = 0

    @property
    def size(self) -> int:
        """Rows of the logits that it writes last."""
        (shape, *_), *_ = self.steps[-1][1:]
        rows: int = shape[0]
        return rows

    def replay(self) -> None:
        assert taped(self.work) == self.steps, "the work is not what was recorded"
        self.replays += 1


@dataclass
class HostRuntime:
    """See `Runtime`."""

    name: str = "host"
    compute_capability: tuple[int, int] = (9, 0)
    num_multiprocessors: int = 1
    free: int = 1 << 30
    graphs: list[Replayed] = field(default_factory=list)
    profiled: int = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def free_bytes(self) -> int:
        return self.free

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        self.profiled += 1
        return 1 << 20

    def empty_pinned_like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    def record_event(self) -> DeviceEvent:
        return HostEvent()

    def capture(self, work: Callable[[], object]) -> CapturedGraph:
        self.graphs.append(Replayed(work, taped(work)))
        return self.graphs[-1]
