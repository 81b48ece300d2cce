"""Exception of the benchmark."""

from __future__ import annotations


class BenchError(Exception):
    """Raised if nothing can be measured. The message is one sentence with the reason and the remedy."""
