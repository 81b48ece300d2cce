"""Total seconds that the engine spends in each phase of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.engine.scheduling import StepDurations


@dataclass(slots=True)
class PhaseSeconds:
    """Sums since the start. Phases of different steps overlap while several steps are in flight."""

    plan: float = 0.0
    """The scheduler plans the step."""
    launch: float = 0.0
    """The host moves blocks and builds inputs."""
    compute: float = 0.0
    """The device runs the model."""
    sample: float = 0.0
    """The device samples tokens from the logits."""
    commit: float = 0.0
    """The host commits the results and builds the deltas."""

    def record_step(self, durations: StepDurations, commit_s: float) -> None:
        """Add the executor's durations of one step and the seconds of its commit."""
        self.launch += durations.launch_s
        self.compute += durations.compute_s
        self.sample += durations.sample_s
        self.commit += commit_s

    def to_dict(self) -> dict[str, float]:
        """Return a mapping from phase to seconds."""
        return {
            "plan": self.plan,
            "launch": self.launch,
            "compute": self.compute,
            "sample": self.sample,
            "commit": self.commit,
        }
