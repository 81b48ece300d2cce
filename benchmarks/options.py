"""Command-line options that several benchmarks have."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def parse_choices(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return a parser for `type=` that accepts comma-separated names from `known`."""

    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{unknown[0]!r} is unknown; choose from {', '.join(known)}"
            )
        return chosen

    return parse
