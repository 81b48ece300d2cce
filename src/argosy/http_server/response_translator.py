"""Translation of a response into the client's dialect of the API, between a handler and the connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from argosy.protocol import ApiError


class ResponseDialect(Protocol):
    """Shape of errors and headers in one dialect of the API."""

    def encode_error(self, error: ApiError, request_id: str) -> bytes:
        """Encode the body of an error response."""

    def translate_headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the headers with which a response is sent."""


class ResponseTranslator(Protocol):
    """Translator of one response from the OpenAI chat or completions API, sent as a whole or as a stream."""

    @property
    def stream_content_type(self) -> bytes:
        """Content type of a translated stream."""

    async def translate_response(self, status: int, body: bytes, request_id: str) -> bytes:
        """Translate a whole response.

        Raises:
            ApiError: 502 if the body is no response of the API.
        """

    def translate_events(self, events: bytes) -> bytes:
        """Translate a part of a stream of server-sent events.

        Raises:
            ValueError: An event is malformed.
        """

    def translate_comment(self, comment: bytes) -> bytes:
        """Translate a comment that keeps an idle stream alive."""

    def translate_heartbeat(self, event: bytes) -> bytes:
        """Translate an event without content that keeps an idle stream alive."""

    async def finish_stream(self) -> bytes:
        """Return the last events of a stream, which are sent when all others have been."""


def translate_writes(
    write: Callable[[bytes], None], translator: ResponseTranslator
) -> Callable[[bytes], None]:
    """Return a function that writes the translation of its data."""

    def write_translated(events: bytes) -> None:
        if translated := translator.translate_events(events):
            write(translated)

    return write_translated
