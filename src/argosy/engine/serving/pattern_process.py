"""Process that splits adversarial texts by one pattern of a tokenizer, within bounds of CPU time and memory.

`tokenizer_check` starts it as `python -m argosy.engine.serving.pattern_process`, with the pattern on standard input.
It ends with status 0 if the pattern is harmless, by SIGPROF if it takes too long, and otherwise by an error.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

from tokenizers import NormalizedString, PreTokenizedString, Regex

from argosy.engine.serving.process_limits import limit_resources

MAX_CPU_S = 1.0
"""CPU time for all texts. A pattern of linear time takes a fifth of it, one of quadratic time several times as much."""
MAX_MEMORY_BYTES = 512 << 20
TEXT_CHARS = 1 << 15
MAX_UNITS = 64
_UNITS = (
    "a",
    "A",
    " ",
    "1",
    "\n",
    ".",
    "_",
    "é",
    "漢",
    "\u0301",
    " \n",
    "a ",
    "1a",
    "aA",
    "'s",
    "\t",
)
"""Texts whose repetitions patterns of words, numbers and spaces treat differently."""
_END = "\x01 \n\r\tzZ9!,:;()[]{}'\"-"
"""End of each text. Matches that fail at it fail again from each later start, if the pattern is not of linear time."""


def adversarial_texts(pattern: str) -> Iterator[str]:
    """Yield long repetitions of characters that patterns in general and this one distinguish."""
    characters = dict.fromkeys(pattern)
    words = "".join(each if each.isalnum() else " " for each in characters).split()
    units = list(dict.fromkeys((*_UNITS, *characters, *words, pattern)))[:MAX_UNITS]
    end = _END + "".join(characters)
    for unit in units:
        yield unit * (TEXT_CHARS // len(unit)) + end


def main() -> None:
    """Split the texts by the pattern on standard input."""
    pattern = sys.stdin.read()
    limit_resources(MAX_MEMORY_BYTES)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    regex = Regex(pattern)
    for text in adversarial_texts(pattern):
        pieces = PreTokenizedString(text)

        def split(_index: int, piece: NormalizedString) -> list[NormalizedString]:
            return piece.split(regex, "isolated")

        pieces.split(split)


if __name__ == "__main__":
    main()
