"""Interface of what an executor does with the outputs of a model: sample tokens, or pool hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from argosy.engine.scheduling import AdmittedSequence, StepPlan, StepResult

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from argosy.engine.execution.executor.persistent_batch import PackedStep
    from argosy.engine.execution.kernels.device import DeviceEvent


class StepHandle(Protocol):
    """Handle of a launched step."""

    def result(self) -> StepResult:
        """Wait for the step and return its result. May be called once.

        If it raises, all results of the step are invalid.
        """
        ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """Handle of a step that is already done."""

    step_result: StepResult

    def result(self) -> StepResult:
        return self.step_result


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """Step whose model is launched."""

    plan: StepPlan
    packed: PackedStep
    sample_index: Tensor
    """[C] int64 on the device, where `PersistentBatch.append_tokens` stores sampled tokens."""
    outputs: Tensor
    """[L, ...], what the model returned for `packed.logit_index`, and rows of padding."""
    restores: dict[int, Future[bool]]
    """Restored KV block -> whether its data is intact."""
    launch_s: float
    ready: DeviceEvent
    """Event after the copy of the inputs."""
    computed: DeviceEvent
    """Event after the model."""


def find_corrupt_blocks(restores: dict[int, Future[bool]]) -> list[int]:
    """Wait for the checksums of restored blocks, and return the blocks whose data is corrupt."""
    return [block for block, intact in restores.items() if not intact.result()]


class OutputStage(Protocol):
    """Part of an executor that turns outputs of the model into results, with the parameters of each row."""

    def clear(self) -> None:
        """Discard all rows."""
        ...

    def keep_rows(self, rows: set[int]) -> None:
        """Release the memory of all other rows, whose sequences have ended. Called between two steps."""
        ...

    def admit(self, admission: AdmittedSequence) -> None:
        """Fill a row for a sequence that joins the batch."""
        ...

    def find_forced_tokens(self, row: int) -> list[int]:
        """Return tokens that probably follow, because a row's grammar allows one text only."""
        ...

    def begin(self, plan: StepPlan) -> tuple[NDArray[np.int64] | None, Tensor | None]:
        """Start what can run beside the model.

        Returns:
            Flat tokens whose outputs are read beside those of the sampled ones, and the token types of all flat tokens
            (see `Batch.token_types`). None if there are none.
        """
        ...

    def finish(self, step: LaunchedStep) -> StepHandle:
        """Launch what remains of the step, the last one for which `begin` was called."""
        ...
