"""Forms (`multipart/form-data`, RFC 7578) with one file, which is read as a stream while it arrives."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from argosy.protocol import ApiError, invalid_request

MAX_PARTS = 20
MAX_FIELD_BYTES = 4096
"""Size of a field other than the file."""
MAX_FORM_BYTES = 256 * 1024
"""Bytes that a form may have beside its file, with the headers of its parts."""
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it logs what clients do wrong


class MultipartForm:
    """Form of one request. Parse it in a thread: a body can be such that each of its bytes costs time.

    Args:
        content_type: Content type of the request.
        file_field: Name of the field with the file.
        max_file_bytes: Maximum size of the file.

    Raises:
        ApiError: 400 if the body is no form.
    """

    def __init__(self, content_type: str, file_field: str, max_file_bytes: int) -> None:
        media_type, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if media_type != b"multipart/form-data" or not boundary:
            raise _form_error("Send the file in a form, with Content-Type: multipart/form-data.")
        self.fields: dict[str, str] = {}
        """The other fields, complete when `iter_file` has ended. Of fields with one name, the last."""
        self.filename: str | None = None
        """Name of the file without folders, or None if the client gave none."""
        self.media_type = "application/octet-stream"
        """Content type of the file, as the client gave it."""
        self.max_body_bytes = max_file_bytes + MAX_FORM_BYTES
        """Maximum size of the body of the request."""
        self._file_field = file_field
        self._max_file_bytes = max_file_bytes
        self._file_bytes = 0
        self._blocks: list[bytes] = []
        """Data of the file that was parsed and not taken yet."""
        self._has_file = self._is_complete = False
        self._part_count = 0
        self._header_name = b""
        self._header_value = b""
        self._headers: dict[bytes, bytes] = {}
        self._field: str | None = None
        """Name of the field that is parsed; None for the file."""
        self._value = b""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise _form_error(f"The boundary of the form is invalid ({error}).") from error

    def iter_file(self, body: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the file as its body arrives, and parse the fields before and after it.

        Raises:
            ApiError: 400 if the form is invalid or has no such file, 413 if the file is too large.
        """
        for part in body:
            try:
                self._parser.write(part)
            except FormParserError as error:
                raise _form_error(f"The form is malformed ({error}).") from error
            if self._blocks:
                block = b"".join(self._blocks)
                self._blocks.clear()
                yield block
        if not self._is_complete:
            raise _form_error("The form ends before its last boundary.")
        if not self._has_file:
            message = f"The form has no file. Send it in the field '{self._file_field}'."
            raise invalid_request(message, self._file_field, "missing_required_parameter")

    # --- callbacks of the parser -----------------------------------------------------------------

    def _on_part_begin(self) -> None:
        self._part_count += 1
        if self._part_count > MAX_PARTS:
            raise _form_error(f"The form has more than {MAX_PARTS} fields.")
        self._headers.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"").decode("latin-1")
        _, options = parse_options_header(disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        self._value = b""
        self._field = name
        if name != self._file_field:
            return
        if self._has_file:
            raise _form_error(f"The form has two fields '{name}'. Send one file in a request.")
        self._field, self._has_file = None, True
        filename = options.get(b"filename")
        if filename is not None:
            self.filename = filename.decode(errors="replace").rpartition("/")[2]
        if b"content-type" in self._headers:
            self.media_type = self._headers[b"content-type"].decode("latin-1")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            self._value += data[start:end]
            if len(self._value) > MAX_FIELD_BYTES:
                message = f"A field of the form has more than {MAX_FIELD_BYTES} bytes."
                raise invalid_request(message, self._field[:100])
            return
        self._file_bytes += end - start
        if self._file_bytes > self._max_file_bytes:
            message = f"The file is larger than {self._max_file_bytes:,} bytes. Send a smaller one."
            raise ApiError(413, "request_too_large", message)
        self._blocks.append(data[start:end])

    def _on_part_end(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._value.decode(errors="replace")

    def _on_end(self) -> None:
        self._is_complete = True


def _form_error(message: str) -> ApiError:
    return ApiError(400, "invalid_form", message)
