"""GPU device on host tensors, with graphs that check that each replay does the same work, and a count of waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from argosy.engine.execution.kernels.device import HostEvent
from argosy.engine.execution.kernels.gpu.device import GpuDevice

TORCH_DEVICE = torch.device("cpu", 0)
"""Stands for a GPU. Torch knows one kind of host tensor, but a copy to this device is one that it executes."""
PINNED: dict[int, Tensor] = {}
"""Address of its storage -> each tensor in pinned memory, which stays allocated so that no other gets the address."""

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
WAITING_OPERATIONS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"),
}
"""Operations whose result is on the host, or whose shape depends on values."""
WAITING_CALLS = {"tolist", "numpy", "cpu", "__array__"}


class WorkRecorder(TorchDispatchMode):
    """Records what a device would have to do, and what the host would wait for.

    A tensor counts as one of the host if it was created from host data or without a device while work was recorded, or
    if it is pinned. All other tensors are on the device.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.steps: list[tuple[Any, ...]] = []
        """Operations and kernel launches with the shapes of their arguments, and the addresses of inputs."""
        self.launches: list[str] = []
        """Kernels and operations of torch that compute on the device, without views and allocations."""
        self.copies: list[str] = []
        """Copies between host and device."""
        self.waits: list[str] = []
        """Calls that wait for the device: reads, results of unknown shape, and copies of memory that is not pinned."""
        self._created: set[int] = set()
        self._host: dict[int, Tensor] = {}
        """Address of its storage -> tensor of the host."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode, torch passes operations that consist of others
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        self.steps.append((str(func), *map(self._describe, tree_leaves((args, kwargs)))))
        result = func(*args, **kwargs)
        self._classify_results(func, args, kwargs, result)
        self._count(func, args, kwargs, result)
        return result

    def is_on_host(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return address in self._host or address in PINNED

    def move_to_host(self, tensor: Tensor) -> None:
        """Count a tensor as one of the host from now on."""
        self._host[tensor.untyped_storage().data_ptr()] = tensor

    def move_to_device(self, tensor: Tensor) -> None:
        """Count a tensor as one of the device from now on."""
        self._host.pop(tensor.untyped_storage().data_ptr(), None)

    def _classify_results(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        device, from_host_data = kwargs.get("device"), _name(func) == "lift_fresh"
        if device is None:
            inputs = _tensors((args, kwargs))
            on_host = from_host_data or all(map(self.is_on_host, inputs))
        else:
            on_host = torch.device(device).index is None
        for leaf in _tensors(result):
            is_new = from_host_data or not self._is_view(leaf, args)
            if is_new:
                self._created.add(leaf.untyped_storage().data_ptr())
            if is_new and on_host:
                self.move_to_host(leaf)

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        name, inputs = _name(func), _tensors((args, kwargs))
        # All empty tensors have one address.
        filled = (tensor for tensor in (*inputs, *_tensors(result)) if tensor.numel())
        on_host = {self.is_on_host(tensor) for tensor in filled}
        if on_host <= {True} or func.is_view or name in ALLOCATIONS:
            return
        if name in {"copy_", "_to_copy"} and len(on_host) == 2:
            destination, source = (*_tensors(args), *_tensors(result))[:2]
            is_async = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
            self._count_copy(destination, source, is_async=bool(is_async))
            return
        if name == "_to_copy" and kwargs.get("dtype") == inputs[0].dtype:
            return  # a GPU returns the tensor itself, which TORCH_DEVICE copies
        index = _tensors(args[1]) if name.lstrip("_").startswith("index") else []
        for tensor in index:
            if self.is_on_host(tensor):
                self.copies.append(f"{name} by host tensor")
                self.waits.append(self.copies[-1])
            if tensor.dtype in {torch.bool, torch.uint8}:
                self.waits.append(f"{name} by bool")
        if name in WAITING_OPERATIONS and kwargs.get("output_size") is None:
            self.waits.append(name)
        if name != "_local_scalar_dense" and any(each.numel() for each in _tensors(result)):
            self.launches.append(name)

    def _count_copy(self, first: Tensor, second: Tensor, *, is_async: bool) -> None:
        """Count a copy between a host tensor and a device tensor, in either direction."""
        pinned = any(each.untyped_storage().data_ptr() in PINNED for each in (first, second))
        self.copies.append(f"copy of {'pinned' if pinned else 'pageable'} memory")
        if not (pinned and is_async):
            self.waits.append(self.copies[-1])

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
            self.launches.append(name)
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                launch(executor, *args, **kwargs)

        return call

    @staticmethod
    def _is_view(leaf: Tensor, args: tuple[Any, ...]) -> bool:
        """Return whether a tensor is an argument or a view of one."""
        storages = [arg.untyped_storage().data_ptr() for arg in _tensors(args)]
        return leaf.untyped_storage().data_ptr() in storages


class _CallRecorder(TorchFunctionMode):
    """Records waits of calls that torch dispatches to no operation if a tensor is on the host."""

    def __init__(self, recorder: WorkRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        recorder, kwargs, name = self._recorder, kwargs or {}, func.__name__
        result = func(*args, **kwargs)
        if name in {"tensor", "as_tensor"}:
            device = kwargs.get("device")
            if device is not None and torch.device(device).index is not None:
                recorder.move_to_device(result)
                if result.numel():
                    recorder.copies.append(name)
                    recorder.waits.append(name)
        elif not args or not isinstance(args[0], Tensor) or recorder.is_on_host(args[0]):
            pass
        elif func == torch.Tensor.device.__get__:
            return TORCH_DEVICE
        elif name in WAITING_CALLS or (name == "to" and _moves_to_host(args[1:], kwargs)):
            recorder.copies.append(name)
            recorder.waits.append(name)
            if isinstance(result, Tensor):
                with _disable_current_modes():
                    result = result.clone()
                recorder.move_to_host(result)
        return result


def _moves_to_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments of `Tensor.to` name the host."""
    targets = [torch.device(each) for each in (*args, *kwargs.values()) if _is_device(each)]
    return any(target.index is None for target in targets)


def _is_device(value: object) -> bool:
    return isinstance(value, (str, torch.device))


def _name(func: Any) -> str:
    """Return the name of an operation, without namespace and overload."""
    name: str = func.overloadpacket.__name__
    return name


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def record_work(work: Callable[[], object]) -> WorkRecorder:
    """Run `work` and return what it did."""
    recorder = WorkRecorder()
    launch = recorder.wrap_launch(GridExecutor.__call__)
    thread = threading.get_ident()

    def wait(_event: HostEvent) -> None:
        if threading.get_ident() == thread:
            recorder.waits.append("event")

    with (
        mock.patch.object(GridExecutor, "__call__", launch),
        mock.patch.object(HostEvent, "synchronize", wait),
        _CallRecorder(recorder),
        recorder,
    ):
        work()
    return recorder


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
        assert record_work(self.work).steps == self.steps, "the work differs from the captured work"
        self.replays += 1


COPY_TIMEOUT_S = 60.0
"""Maximum wait of another thread for copies, which the thread of the steps executes."""


class CopyStream(TorchDispatchMode):
    """Stream for copies, which are executed as late as events allow."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.is_current = False
        self.has_waited = False
        """Whether the current copies follow an event of the other stream."""
        self.num_launched = 0
        self._num_executed = 0
        self._pending: list[Callable[[], object]] = []
        self._executed = threading.Condition()

    def __enter__(self) -> Self:
        self.is_current, self.has_waited = True, False
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.is_current = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        assert func == torch.ops.aten.copy_.default, f"{func} in the stream for copies"
        assert self.has_waited, "a copy without an event before it"
        self._pending.append(partial(func, *args, **(kwargs or {})))
        self.num_launched += 1
        return args[0]

    def execute(self, number: int) -> None:
        """Execute the first `number` copies, if they are not yet."""
        with self._executed:
            while self._num_executed < number:
                self._pending.pop(0)()
                self._num_executed += 1
            self._executed.notify_all()

    def wait_for(self, number: int) -> None:
        """Wait until the first `number` copies are executed."""
        with self._executed:
            assert self._executed.wait_for(lambda: self._num_executed >= number, COPY_TIMEOUT_S)


class StreamEvent(HostEvent):
    """Event in the stream for copies, or in the stream of steps, whose work is done at once."""

    def __init__(self, copies: CopyStream) -> None:
        super().__init__()
        self._copies = copies
        self._num_copies = copies.num_launched if copies.is_current else 0
        self._thread = threading.get_ident()

    def synchronize(self) -> None:
        super().synchronize()
        if threading.get_ident() == self._thread:
            self._copies.execute(self._copies.num_launched)  # meanwhile
        else:
            self._copies.wait_for(self._num_copies)

    def wait(self) -> None:
        if self._copies.is_current:
            self._copies.has_waited = True
        else:
            self._copies.execute(self._num_copies)


class HostDevice(GpuDevice):
    """GPU whose kernels run in the interpreter, on host tensors."""

    name = "host"
    torch_device = TORCH_DEVICE
    num_multiprocessors = 1

    def __init__(self) -> None:
        self.compute_capability = (9, 0)
        self.available_bytes = 1 << 30
        self.graphs: list[CheckedGraph] = []
        self.measurements = 0
        self.capture_graph = self._capture
        self._copy_stream = CopyStream()

    def free_bytes(self) -> int:
        return self.available_bytes

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        self.measurements += 1
        return 1 << 20

    def empty_pinned_like(self, tensor: Tensor) -> Tensor:
        return _pin(torch.empty(tensor.shape, dtype=tensor.dtype))

    def allocate_host_memory(self, shape: tuple[int, ...]) -> Tensor:
        return _pin(super().allocate_host_memory(shape))

    def copy_stream(self) -> AbstractContextManager[object]:
        return self._copy_stream

    def record_event(self) -> StreamEvent:
        return StreamEvent(self._copy_stream)

    def _capture(self, work: Callable[[], object]) -> Callable[[], object]:
        self.graphs.append(CheckedGraph(work, record_work(work).steps))
        return self.graphs[-1].replay


def _pin(tensor: Tensor) -> Tensor:
    PINNED[tensor.untyped_storage().data_ptr()] = tensor  # all empty tensors have address 0
    return tensor
