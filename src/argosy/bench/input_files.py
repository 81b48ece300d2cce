"""Readers of the files that a workload can repeat: prompts, and published traffic traces.

A file of prompts has JSON lines, or plain text with one prompt per line. The traces are those of three sources:

- Mooncake (FAST'25 artifact): JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`. Each
  block of 512 prompt tokens has an id, and equal prefixes have equal ids.
- BurstGPT: CSV with `Timestamp` (s), `Request tokens` and `Response tokens` (0 for failed requests).
- Azure LLM inference 2023 and 2024: CSV with `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from argosy.bench.errors import BenchError
from argosy.bench.plan import ChatPrompt, TextPrompt

MOONCAKE_BLOCK_TOKENS = 512


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


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded request. `at_s` is relative to the first request of the trace."""

    at_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """Ids of the prompt's blocks of `MOONCAKE_BLOCK_TOKENS` tokens."""


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Read the first `limit` requests, sorted by time. The first line determines the format.

    Requests without generated tokens are left out.

    Raises:
        BenchError: The file cannot be read, or a line is invalid. The message names the line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first_line = file.readline()
            file.seek(0)
            rows = _first_requests(_parse_trace(path, first_line, file), limit)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BenchError(f"Cannot read the trace {path}: {error}.") from error
    if not rows:
        raise BenchError(f"The trace {path} contains no request that generated a token.")
    rows.sort(key=lambda row: row.at_s)
    start = rows[0].at_s
    return [msgspec.structs.replace(row, at_s=row.at_s - start) for row in rows]


def _first_requests(rows: Iterable[TraceRequest], limit: int | None) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    for row in rows:
        if len(requests) == limit:
            break
        if row.output_tokens > 0 and row.input_tokens > 0:
            requests.append(row)
    return requests


def _parse_trace(path: Path, first_line: str, lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Parse the lines in the format that `first_line` indicates."""
    names = {name.strip().strip('"') for name in first_line.split(",")}
    if first_line.lstrip().startswith("{"):
        return _parse_mooncake(path, lines)
    for columns, parse_time in (
        (("Timestamp", "Request tokens", "Response tokens"), float),
        (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _parse_azure_timestamp),
    ):
        if names.issuperset(columns):
            return _parse_csv(path, lines, columns, parse_time)
    raise BenchError(
        f"{path} is not a known trace: its first line is neither a JSON object (Mooncake)"
        " nor the header of BurstGPT or of the Azure LLM inference traces."
    )


def _parse_mooncake(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_MooncakeLine)
        except msgspec.DecodeError as error:
            raise BenchError(f"{path}, line {number}: {error}.") from error
        request = TraceRequest(
            at_s=row.timestamp / 1000,
            input_tokens=row.input_length,
            output_tokens=row.output_length,
            block_ids=row.hash_ids,
        )
        _validate_row(path, number, request)
        yield request


def _parse_csv(
    path: Path, lines: Iterable[str], columns: Sequence[str], parse_time: Callable[[str], float]
) -> Iterator[TraceRequest]:
    for number, row in enumerate(csv.DictReader(lines, skipinitialspace=True), 2):
        try:
            at, input_tokens, output_tokens = (row[name].strip() for name in columns)
            request = TraceRequest(
                at_s=parse_time(at),
                input_tokens=int(input_tokens),
                output_tokens=int(output_tokens),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BenchError(f"{path}, line {number}: a column is missing or malformed.") from error
        _validate_row(path, number, request)
        yield request


def _validate_row(path: Path, number: int, row: TraceRequest) -> None:
    if not math.isfinite(row.at_s) or row.input_tokens < 0 or row.output_tokens < 0:
        raise BenchError(
            f"{path}, line {number}: times must be finite and lengths must not be negative."
        )


def _parse_azure_timestamp(text: str) -> float:
    """Parse `2023-11-16 18:15:46.6805900` (UTC, seven digits) or `2024-05-10 00:00:00.009930+00:00`."""
    seconds, dot, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    timestamp = datetime.fromisoformat(seconds + rest[len(digits) :] if dot else text)
    if timestamp.tzinfo is None:
        timestamp = timestamp.replace(tzinfo=UTC)
    return timestamp.timestamp() + (float(f"0.{digits}") if digits else 0.0)
