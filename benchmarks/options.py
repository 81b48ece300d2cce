"""Options that several benchmarks have."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def choice(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """For `type=`: some of `known`, with commas between them."""

    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return chosen

    return parse
