"""Input, output and error files of batches: lines of JSON that are checked as they are read, and written in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Raw

from argosy.gateway.batches.batch_line import MAX_CUSTOM_ID_CHARS, LineFields, derive_line_id
from argosy.store import Batch, BatchError, BatchLine, EndedLine

MAX_FILE_LINES = 50_000
MAX_LINE_BYTES = 32 * 1024 * 1024
MAX_ERRORS = 1000
"""Errors of a file that a batch shows."""
_UNANSWERED = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "This request was not executed, as the batch was cancelled."),
}
_encode = msgspec.json.encode


class _InputLine(msgspec.Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: Raw


class InputReader:
    """Checks the lines of an input file as they are read, and collects errors. Memory does not grow with the file.

    Args:
        path: Path that all lines name.
        blocks: The file.
    """

    def __init__(self, path: str, blocks: Iterable[bytes]) -> None:
        self._path = path
        self._lines = _split_lines(blocks)
        self._number = 0
        self._known: set[str] = set()
        self.errors: list[BatchError] = []
        self.models: dict[str, int] = {}
        """Models that the lines name, with the first line of each in the file, from 1."""
        self.count = 0
        """Valid lines so far."""

    def read(self, max_lines: int, max_bytes: int) -> list[BatchLine]:
        """Return the next valid lines, about as many as fit the bounds; none at the end or after too many errors."""
        found: list[BatchLine] = []
        size = 0
        while len(found) < max_lines and size < max_bytes and len(self.errors) < MAX_ERRORS:
            data = next(self._lines, None)
            if data is None:
                return found
            self._number += 1
            if not data.strip():
                continue
            if self.count == MAX_FILE_LINES:
                message = f"A batch has at most {MAX_FILE_LINES} lines. Divide the file."
                self.add_error("too_many_lines", message, self._number)
                self._lines = iter(())
                return found
            line = self._check(data)
            if line is not None:
                found.append(line)
                size += len(line.body)
        return found

    def add_error(
        self, code: str, message: str, line: int | None, param: str | None = None
    ) -> None:
        """Add an error of the file, or of one of its lines, from 1."""
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(BatchError(code=code, message=message, line=line, param=param))

    def _check(self, data: bytes) -> BatchLine | None:
        """Return a line, or None and add an error."""
        number = self._number
        try:
            line = msgspec.json.decode(data, type=_InputLine)
            fields = msgspec.json.decode(line.body, type=LineFields)
        except msgspec.ValidationError as error:
            self.add_error("missing_required_parameter", str(error), number)
            return None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.add_error("invalid_json_line", f"The line is no JSON object: {error}", number)
            return None
        found = self._find_error(line, fields)
        if found is not None:
            code, message, param = found
            self.add_error(code, message, number, param)
            return None
        self._known.add(line.custom_id)
        self.models.setdefault(fields.model, number)
        self.count += 1
        return BatchLine(self.count - 1, line.custom_id, fields.model, bytes(line.body))

    def _find_error(self, line: _InputLine, fields: LineFields) -> tuple[str, str, str] | None:
        """Return code, message and parameter of a line's error; None if it is valid."""
        custom_id = line.custom_id
        if not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS or not custom_id.isprintable():
            message = f"Send 1 to {MAX_CUSTOM_ID_CHARS} printable characters."
            return "invalid_custom_id", message, "custom_id"
        if custom_id in self._known:
            return "duplicate_custom_id", f"Another line has {custom_id!r}.", "custom_id"
        if line.method != "POST":
            return "invalid_method", "The method is POST.", "method"
        if line.url != self._path:
            return "invalid_url", f"The batch is for {self._path}.", "url"
        if fields.stream or fields.background:
            message = "Responses of a batch are neither streamed nor run in the background."
            return "stream_unsupported", message, "body.stream"
        return None


def _split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file. A line that is too long is cut, so that it is no JSON."""
    rest = bytearray()
    for block in blocks:
        first, *others = block.split(b"\n")
        if len(rest) <= MAX_LINE_BYTES:
            rest += first
        for line in others:
            yield bytes(rest)
            rest = bytearray(line)
    if rest:
        yield bytes(rest)


def render_lines(
    batch: Batch, read: Callable[[str, int], list[EndedLine]], *, are_errors: bool
) -> Iterator[bytes]:
    """Yield the lines of a batch's output or error file, in the order of its input.

    Args:
        batch: The batch.
        read: Returns ended lines of a batch from a number on, as `BatchStore.read_results`.
        are_errors: Whether the lines without a successful response are rendered; else the others are.
    """
    start = 0
    while lines := read(batch.id, start):
        for line in lines:
            is_error = line.status_code is None or line.status_code >= 300
            if is_error == are_errors:
                yield _encode(_render_line(batch, line)) + b"\n"
        start = lines[-1].line + 1


def _render_line(batch: Batch, line: EndedLine) -> dict[str, Any]:
    request_id = derive_line_id(batch.id, line.line)
    response = error = None
    if line.status_code is None or line.body is None:
        code, message = _UNANSWERED[line.state]
        error = {"code": code, "message": message}
    else:
        response = {
            "status_code": line.status_code,
            "request_id": request_id,
            "body": Raw(line.body),
        }
    return {"id": request_id, "custom_id": line.custom_id, "response": response, "error": error}
