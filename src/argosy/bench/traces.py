"""Recorded traffic as published: the Mooncake, BurstGPT and Azure LLM inference traces.

Mooncake (FAST'25 artifact): JSON lines of `timestamp` (ms), `input_length`, `output_length` and
`hash_ids`, one id for each block of 512 prompt tokens, equal ids for equal beginnings.
BurstGPT: CSV with `Timestamp` (s), `Request tokens`, `Response tokens` (0: it failed).
Azure LLM inference 2023 and 2024: CSV with `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from argosy.bench.errors import BenchError

MOONCAKE_BLOCK_TOKENS = 512


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded request; `at_s` counts from the first of the trace."""

    at_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """Names of the prompt's blocks of `MOONCAKE_BLOCK_TOKENS`."""


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests in order of time; the first line tells the format.

    Requests that generated nothing are left out. Raises BenchError naming the line that is wrong.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            rows = _first_requests(_parse_trace(path, first, file), limit)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BenchError(f"Cannot read the trace {path}: {error}.") from error
    if not rows:
        raise BenchError(f"The trace {path} has no request that generated a token.")
    rows.sort(key=lambda row: row.at_s)
    start = rows[0].at_s
    return [msgspec.structs.replace(row, at_s=row.at_s - start) for row in rows]


def _first_requests(rows: Iterable[TraceRequest], limit: int | None) -> list[TraceRequest]:
    taken: list[TraceRequest] = []
    for row in rows:
        if len(taken) == limit:
            break
        if row.output_tokens > 0 and row.input_tokens > 0:
            taken.append(row)
    return taken


def _parse_trace(path: Path, first: str, lines: Iterable[str]) -> Iterator[TraceRequest]:
    """All of `lines`, whose format the `first` tells."""
    names = {name.strip().strip('"') for name in first.split(",")}
    if first.lstrip().startswith("{"):
        return _parse_mooncake(path, lines)
    if {"Timestamp", "Request tokens", "Response tokens"} <= names:
        return _parse_csv(path, lines, _parse_burstgpt_row)
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        return _parse_csv(path, lines, _parse_azure_row)
    raise BenchError(
        f"{path} is no trace that is known here: its first line is neither a JSON object (Mooncake)"
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
        traced = TraceRequest(
            at_s=row.timestamp / 1000,
            input_tokens=row.input_length,
            output_tokens=row.output_length,
            block_ids=row.hash_ids,
        )
        _validate_row(path, number, traced)
        yield traced


def _parse_csv(
    path: Path, lines: Iterable[str], parse_row: Callable[[dict[str, str]], TraceRequest]
) -> Iterator[TraceRequest]:
    for number, row in enumerate(csv.DictReader(lines, skipinitialspace=True), 2):
        try:
            traced = parse_row(row)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BenchError(f"{path}, line {number}: a column is missing or malformed.") from error
        _validate_row(path, number, traced)
        yield traced


def _validate_row(path: Path, number: int, row: TraceRequest) -> None:
    if not math.isfinite(row.at_s) or row.input_tokens < 0 or row.output_tokens < 0:
        raise BenchError(f"{path}, line {number}: times are finite and lengths not negative.")


def _parse_burstgpt_row(row: dict[str, str]) -> TraceRequest:
    return TraceRequest(
        at_s=float(row["Timestamp"]),
        input_tokens=int(row["Request tokens"]),
        output_tokens=int(row["Response tokens"]),
    )


def _parse_azure_row(row: dict[str, str]) -> TraceRequest:
    return TraceRequest(
        at_s=_parse_azure_timestamp(row["TIMESTAMP"].strip()),
        input_tokens=int(row["ContextTokens"]),
        output_tokens=int(row["GeneratedTokens"]),
    )


def _parse_azure_timestamp(text: str) -> float:
    """`2023-11-16 18:15:46.6805900` (UTC, seven digits) or `2024-05-10 00:00:00.009930+00:00`."""
    whole, dot, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    moment = datetime.fromisoformat(whole + rest[len(digits) :] if dot else text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)
