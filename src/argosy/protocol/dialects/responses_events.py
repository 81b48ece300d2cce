"""Client events of the Responses API over a WebSocket."""

from __future__ import annotations

import msgspec

from argosy.protocol.dialects.responses_requests import ResponsesRequest, parse_responses_body
from argosy.protocol.errors import invalid_request
from argosy.protocol.parsing import parse_body


class ClientEvent(msgspec.Struct, frozen=True):
    """Event of a client, with the fields of `response.steer`. Others are parsed by their type."""

    type: str
    input: msgspec.Raw = msgspec.Raw(b"null")
    previous_response_id: str | None = None


class CreateResponseEvent(ResponsesRequest, frozen=True, kw_only=True):
    """Event `response.create`: a request for a response that is streamed."""

    type: str
    stream_id: str | None = None
    generate: bool | None = None
    """Whether the response has output. If false, it only keeps its input, which the next response continues."""


def parse_client_event(message: bytes) -> ClientEvent:
    """Parse a message of a client as far as all events agree.

    Raises:
        ApiError: 400 if the message is no event, 413 if it has too many values.
    """
    return parse_body(ClientEvent, message)


def parse_create_event(
    message: bytes, *, refuse_unknown: bool = False
) -> tuple[CreateResponseEvent, tuple[str, ...]]:
    """Parse the event `response.create`.

    Returns:
        The event, which asks for a stream, and the paths of its unknown fields.

    Raises:
        ApiError: 400 if the event is invalid or needs what a connection does not support, 413 if it has too many
            values.
    """
    event, ignored = parse_responses_body(
        CreateResponseEvent, message, refuse_unknown=refuse_unknown
    )
    if event.stream_id is not None:
        text = "A connection runs one response after the other. Remove 'stream_id', or open more connections."
        raise invalid_request(text, "stream_id", "unsupported_parameter")
    if event.background:
        text = "Background responses need no connection. Remove 'background', or send the request by POST."
        raise invalid_request(text, "background", "unsupported_parameter")
    return msgspec.structs.replace(event, stream=True), ignored
