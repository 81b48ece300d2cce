"""GPU device on host tensors, with graphs that check that each replay does the same work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from argosy.engine.execution.kernels.gpu.device import GpuDevice


class WorkRecorder(TorchDispatchMode):
    """Records operations and kernel launches with the shapes of their arguments, and the addresses of inputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.steps: list[tuple[Any, ...]] = []
        self._created: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.steps.append((str(func), *map(self._describe, tree_leaves((args, kwargs)))))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not self._is_view(leaf, args):
                self._created.add(leaf.untyped_storage().data_ptr())
        return result

    def _describe(self, leaf: object) -> object:
        """Return shape, strides and address of a tensor. Tensors created by the work have no fixed address."""
        if not isinstance(leaf, torch.Tensor):
            return str(leaf)
        is_created = leaf.untyped_storage().data_ptr() in self._created
        return (tuple(leaf.shape), leaf.stride(), "created" if is_created else leaf.data_ptr())

    def wrap_launch(self, launch: Callable[..., None]) -> Callable[..., None]:
        """Wrap `GridExecutor.__call__` to record the launch, without the operations of the interpreter."""

        def call(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            name = executor.fn.__name__
            leaves = tree_leaves((executor.grid, args, kwargs))
            self.steps.append((name, *map(self._describe, leaves)))
            with _disable_current_modes():
                launch(executor, *args, **kwargs)

        return call

    @staticmethod
    def _is_view(leaf: Tensor, args: tuple[Any, ...]) -> bool:
        """Return whether a tensor is an argument or a view of one."""
        storages = [
            arg.untyped_storage().data_ptr()
            for arg in tree_leaves(args)
            if isinstance(arg, torch.Tensor)
        ]
        return leaf.untyped_storage().data_ptr() in storages


def record_work(work: Callable[[], object]) -> list[tuple[Any, ...]]:
    """Run `work` and return its operations and launches."""
    recorder = WorkRecorder()
    launch = recorder.wrap_launch(GridExecutor.__call__)
    with mock.patch.object(GridExecutor, "__call__", launch), recorder:
        work()
    return recorder.steps


@dataclass
class CheckedGraph:
    """Graph that repeats its work, and checks that it equals the captured work."""

    work: Callable[[], object]
    steps: list[tuple[Any, ...]]
    replays: int = 0

    @property
    def size(self) -> int:
        """Number of rows of the logits, which are written last."""
        (shape, *_), *_ = self.steps[-1][1:]
        rows: int = shape[0]
        return rows

    def replay(self) -> None:
        assert record_work(self.work) == self.steps, "the work differs from the captured work"
        self.replays += 1


class HostDevice(GpuDevice):
    """GPU whose kernels run in the interpreter, on host tensors."""

    name = "host"
    torch_device = torch.device("cpu")
    num_multiprocessors = 1

    def __init__(self) -> None:
        self.compute_capability = (9, 0)
        self.available_bytes = 1 << 30
        self.graphs: list[CheckedGraph] = []
        self.measurements = 0
        self.capture_graph = self._capture

    def free_bytes(self) -> int:
        return self.available_bytes

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        self.measurements += 1
        return 1 << 20

    def empty_pinned_like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    def _capture(self, work: Callable[[], object]) -> Callable[[], object]:
        self.graphs.append(CheckedGraph(work, record_work(work)))
        return self.graphs[-1].replay
