"""Control of a threshold of scores so that a share of the live traffic, or of its cost, is the wanted one."""

from __future__ import annotations

GAIN = 0.01
"""Part of the range of scores by which one request moves the threshold if its share is off by 1."""


class ShareController:
    """Threshold that follows the traffic: it rises after each request above the share, and falls after each below it.

    In the long run the mean share is the wanted one (Robbins and Monro 1951), whatever scores the traffic has. The
    threshold stays within the scores of the training half.
    """

    def __init__(self, threshold: float, target: float, low: float, high: float) -> None:
        """Create a controller.

        Args:
            threshold: Threshold at the start.
            target: Wanted mean of the recorded shares.
            low: Lowest threshold.
            high: Highest threshold.
        """
        self.threshold = threshold
        self._target = target
        self._low, self._high = low, high

    def record(self, share: float) -> None:
        """Record a request: 1 if it counts in full, such as one for the large model, or less."""
        moved = self.threshold + GAIN * (self._high - self._low) * (share - self._target)
        self.threshold = min(self._high, max(self._low, moved))
