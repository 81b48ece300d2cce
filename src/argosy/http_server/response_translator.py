"""Translation of a response into the client's dialect of the API, between a handler and the connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from argosy.http_server.http_request import Headers
from argosy.protocol import ApiError


@dataclass(frozen=True, slots=True)
class ResponseDialect:
    """Shape of errors and headers in one dialect of the API."""

    encode_error: Callable[[ApiError, str], bytes]
    """Encodes the body of an error response, with the request's id."""
    translate_headers: Callable[[Headers], Headers]
    """Returns the headers with which a response is sent."""


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
