"""Where the engine's time goes: seconds by the phases of a step, summed up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.engine.scheduling import StepDurations


@dataclass(slots=True)
class PhaseSeconds:
    """Sums since the start. Phases of different steps overlap where steps are under way together."""

    plan: float = 0.0
    """The scheduler decides."""
    launch: float = 0.0
    """Blocks are moved and inputs built, on the host."""
    compute: float = 0.0
    """The model, on the device."""
    sample: float = 0.0
    """From logits to tokens, on the device."""
    commit: float = 0.0
    """Results are taken in and deltas made."""

    def record_step(self, durations: StepDurations, commit_s: float) -> None:
        """One more step: what its executor took, and the seconds of its commit."""
        self.launch += durations.launch_s
        self.compute += durations.compute_s
        self.sample += durations.sample_s
        self.commit += commit_s

    def to_dict(self) -> dict[str, float]:
        """Phase -> seconds."""
        return {
            "plan": self.plan,
            "launch": self.launch,
            "compute": self.compute,
            "sample": self.sample,
            "commit": self.commit,
        }
