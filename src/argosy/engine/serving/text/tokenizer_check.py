"""Check that a tokenizer of a checkpoint encodes every text in linear time and to a bounded length.

Its definition comes with the model. Patterns are tried in another process, unless they are known. What multiplies a
text is refused by its size.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

from argosy.child_environment import system_variables
from argosy.engine.serving.pattern_process import MAX_CPU_S
from argosy.engine.serving.text.gguf_text import KNOWN_PATTERNS

PROCESS_MODULE = "argosy.engine.serving.pattern_process"
MAX_GROWTH = 8
"""Factor by which replacements of a normalizer may lengthen a text."""
MAX_STEPS = 64
"""Number of steps of a section. Each takes its time for each text."""
MAX_SIMPLE_CHARS = 200
"""Length of a pattern up to which it may be known as harmless by its form."""
MAX_PIECE_CHARS = 1024
"""Longest token of a Unigram model, and longest word that WordPiece divides. Both take its product with the text."""
MAX_AFFIX_CHARS = 64
"""Longest text that a step adds to each character, word or text."""
MAX_MAPPED_BYTES = 256
"""Longest replacement in a SentencePiece character map. That of the usual map has 33 bytes."""
MAX_WAIT_S = 30
"""Wait for the process. A busy machine may take that long for its CPU time."""
_SIMPLE_PATTERN = re.compile(r"(\\p\{\w+\}|\\.|[^*+?{}()\\])+(\{1,\d\})?")
"""Pattern without repetitions, or with one short one at the end."""
_AFFIXES = ("prepend", "content", "prefix", "continuing_subword_prefix", "end_of_word_suffix")


def check_tokenizer(definition: dict[str, Any]) -> bool:
    """Return whether all patterns of a tokenizer are known. Others had no bad text, as far as has been tried.

    Args:
        definition: Content of tokenizer.json.

    Raises:
        ValueError: A part of it takes too long, or makes texts too long. The message names the part.
    """
    growth = 1
    patterns: dict[str, None] = {}
    for section in ("normalizer", "pre_tokenizer"):
        steps = list(_steps(definition.get(section)))
        if len(steps) > MAX_STEPS:
            raise ValueError(f"the {section} has {len(steps)} steps; {_REMEDY}")
        for step in steps:
            where = f"the step {step.get('type')} of the {section}"
            match step:
                case {"pattern": {"Regex": str(regex)}}:
                    patterns[regex] = None
            match step:
                case {"type": "Replace", "content": str(content), "pattern": dict(replaced)}:
                    growth *= max(1, -(-len(content) // max(1, len(replaced.get("String", "")))))
                case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
                    _check_character_map(encoded, where)
                case _:
                    _check_affixes(step, where)
    if growth > MAX_GROWTH:
        raise ValueError(f"the normalizer makes texts up to {growth} times as long; {_REMEDY}")
    _check_model(definition.get("model") or {})
    unknown = [each for each in patterns if not _is_known(each)]
    for pattern in unknown:
        problem = _try_pattern(pattern)
        if problem:
            raise ValueError(f"the pattern {pattern[:200]!r} of the tokenizer {problem}; {_REMEDY}")
    return not unknown


_REMEDY = "no request would be safe, so use another model, or correct its tokenizer.json"


def _is_known(pattern: str) -> bool:
    is_simple = len(pattern) <= MAX_SIMPLE_CHARS and _SIMPLE_PATTERN.fullmatch(pattern)
    return pattern in KNOWN_PATTERNS or bool(is_simple)


def _steps(section: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - of a file
    """Yield the steps of a section, and those of sequences in it."""
    if isinstance(section, dict):
        yield section
        for name in ("normalizers", "pretokenizers"):
            for step in section.get(name) or ():
                yield from _steps(step)


def _check_character_map(encoded: str, where: str) -> None:
    """Refuse a map with a long replacement. It has the size of its index, the index, and texts that end with NUL."""
    data = b64decode(encoded)
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    if max(map(len, texts.split(b"\0"))) > MAX_MAPPED_BYTES:
        raise ValueError(f"{where} replaces a character by too long a text; {_REMEDY}")


def _check_affixes(part: dict[str, Any], where: str) -> None:
    for name in _AFFIXES:
        text = part.get(name)
        if isinstance(text, str) and len(text) > MAX_AFFIX_CHARS:
            raise ValueError(f"{where} has a {name} of {len(text)} characters; {_REMEDY}")


def _check_model(model: dict[str, Any]) -> None:
    kind = model.get("type")
    where = f"the model {kind} of the tokenizer"
    _check_affixes(model, where)
    longest = 0
    if kind == "WordPiece":
        longest = model.get("max_input_chars_per_word", 0)
    elif kind == "Unigram":
        longest = max((len(piece) for piece, _ in model.get("vocab") or ()), default=0)
    if longest > MAX_PIECE_CHARS:
        raise ValueError(f"{where} compares up to {longest} characters at each position; {_REMEDY}")


@functools.cache
def _try_pattern(pattern: str) -> str:
    """Return what is wrong with a pattern; empty if it splits all texts of the process in time."""
    try:
        process = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", PROCESS_MODULE],
            input=pattern.encode(),
            env=system_variables(os.environ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            timeout=MAX_WAIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"takes more than {MAX_WAIT_S} s for a text"
    if process.returncode == -signal.SIGPROF:
        return f"takes more than {MAX_CPU_S:g} s of CPU time for some texts"
    if process.returncode:
        lines = process.stderr.decode("utf-8", "replace").splitlines()
        return f"fails for some texts ({lines[-1][:200] if lines else process.returncode})"
    return ""
