"""Prompts from a file: JSON lines, or plain text with one prompt per line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from argosy.bench.errors import BenchError
from argosy.bench.plan import ChatPrompt, TextPrompt


class FilePrompt(msgspec.Struct, frozen=True):
    """Prompt, with an output length if the file gives one."""

    prompt: TextPrompt | ChatPrompt
    output_tokens: int | None = None


class _PromptLine(msgspec.Struct):
    prompt: str | None = None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None


def read_prompt_file(path: Path) -> list[FilePrompt]:
    """Read the prompts of a file.

    A name that ends in `.jsonl` or `.json` means one object per line, with `prompt`, `text` or `messages`, and
    optionally `output_tokens` or `max_tokens`.

    Raises:
        BenchError: The file cannot be read, is empty, or has an invalid line.
    """
    try:
        # Not splitlines, because JSON strings may contain Unicode line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"Cannot read the prompts {path}: {error}.") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise BenchError(f"{path} contains no prompt.")
    if path.suffix in {".jsonl", ".json"}:
        return [_parse_line(path, number, line) for number, line in numbered]
    return [FilePrompt(TextPrompt(line)) for _, line in numbered]


def _parse_line(path: Path, number: int, line: str) -> FilePrompt:
    try:
        row = msgspec.json.decode(line, type=_PromptLine)
    except msgspec.DecodeError as error:
        raise BenchError(f"{path}, line {number}: {error}.") from error
    output_tokens = row.output_tokens if row.output_tokens is not None else row.max_tokens
    if output_tokens is not None and output_tokens < 1:
        raise BenchError(f"{path}, line {number}: an output length must be 1 token or more.")
    if row.messages:
        return FilePrompt(ChatPrompt(row.messages), output_tokens)
    text = row.prompt if row.prompt is not None else row.text
    if not text:
        raise BenchError(f"{path}, line {number}: give `prompt`, `text` or `messages`.")
    return FilePrompt(TextPrompt(text), output_tokens)
