"""Memory of a model that sleeps: what it frees, how it gets it again, and the test that its results are the same."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from argosy.engine.execution.executor.draft_model import DraftModel
from argosy.engine.execution.executor.executor import Executor, ExecutorParts

DROPS_WEIGHTS = 2
"""Level of sleep from which a model has no weights. With level 1 it has weights only, and with level 0 it is awake."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Loaded weights of a model, and what is created of them."""

    executor: ExecutorParts
    create_draft_model: Callable[[], DraftModel] | None
    """None if no draft model is used."""
    compute_check: Callable[[], str]
    """Computes a few tokens, and returns a digest of their logits."""
    files: Sequence[Path]
    """Files that the weights are mapped from."""


class SleepHandler:
    """Frees the memory of a model, and allocates it again.

    Weights that are mapped from files need no memory of their own, so that level 1 keeps them. The blocks in the host
    memory of the executor stay at any level.
    """

    def __init__(
        self,
        executor: Executor,
        parts: ModelParts,
        load: Callable[[Callable[[str, float], None]], ModelParts],
    ) -> None:
        """Create the handler of a model that is awake. `load` loads its weights again, and reports its progress."""
        self._executor = executor
        self._parts: ModelParts | None = parts
        self._load = load
        self._expected_check = ""
        self.level = 0
        """Present level of sleep, 0 to `DROPS_WEIGHTS`."""

    def sleep(self, level: int) -> None:
        """Free memory, up to `level`. No step is in flight, and nothing else refers to the draft model."""
        parts = self._parts
        if parts is None or level <= self.level:
            return
        self._expected_check = self._expected_check or parts.compute_check()
        if not self.level:
            self._executor.release()
        self.level = level
        if level >= DROPS_WEIGHTS:
            files, self._parts = parts.files, None
            del parts
            gc.unfreeze()  # the model is among the objects that are frozen after the start
            gc.collect()
            gc.freeze()
            for file in files:
                _drop_page_cache(file)

    def wake_up(self, level: int, progress: Callable[[str, float], None]) -> None:
        """Allocate memory again, down to `level`.

        Raises:
            RuntimeError: The results of the model are not those that it had before it slept.
            ValueError: The files of the model are others now.
        """
        if level >= self.level:
            return
        if self._parts is None:
            self._parts = self._load(progress)
        if level == 0:
            self._executor.restore(self._parts.executor)
            self._executor.capture_graphs()
            if self._parts.compute_check() != self._expected_check:
                raise RuntimeError(
                    "the results of the model after its sleep differ from those before; the engine starts anew"
                )
        self.level = level

    def create_draft_model(self) -> DraftModel | None:
        """Create the draft model of a model that is awake, if one is used."""
        if self._parts is None or self._parts.create_draft_model is None:
            return None
        draft_model = self._parts.create_draft_model()
        draft_model.warm_up()
        return draft_model


def _drop_page_cache(file: Path) -> None:
    """Let the system forget a file's pages that no process maps, where that is possible."""
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
