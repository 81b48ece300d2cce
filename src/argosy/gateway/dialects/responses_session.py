"""Session of the Responses API over a WebSocket: dispatches the client's events."""

from __future__ import annotations

import msgspec

from argosy.gateway.dialects.responses_handlers import LastResponse, ResponsesHandlers
from argosy.gateway.principal import Principal
from argosy.http_server import HttpExchange
from argosy.protocol import format_event, invalid_request
from argosy.protocol.dialects import ClientEvent, parse_client_event


class ResponsesSession:
    """Responses of one connection, one after the other."""

    def __init__(self, responses: ResponsesHandlers) -> None:
        self._responses = responses
        self._last = LastResponse()

    async def handle(self, exchange: HttpExchange, principal: Principal) -> None:
        """Handle one event.

        Raises:
            ApiError: 400 if the event is unknown or malformed.
        """
        event = parse_client_event(await exchange.read_body())
        match event.type:
            case "response.create":
                await self._responses.create_in_session(exchange, principal, self._last)
            case "response.steer":
                await _send_event(exchange, _describe_refused_steering(event))
            case "response.processed":  # an acknowledgement of Codex
                await _send_event(exchange, b"")
            case kind:
                message = f"The event type {kind[:64]!r} is unknown. Send 'response.create'."
                raise invalid_request(message, "type")


async def _send_event(exchange: HttpExchange, data: bytes) -> None:
    await exchange.start_stream()
    if data:
        await exchange.write(format_event(data))
    await exchange.end_stream()


def _describe_refused_steering(event: ClientEvent) -> bytes:
    """Return the event that gives steering input back to the client, which sends it in a request of its own."""
    message = "Steering is not supported. Send the input in a 'response.create' event that continues the response."
    return msgspec.json.encode(
        {
            "type": "response.steer.failed",
            "sequence_number": 0,
            "error": {
                "type": "invalid_request_error",
                "code": "steering_not_supported",
                "message": message,
            },
            "steer": {"previous_response_id": event.previous_response_id, "input": event.input},
        }
    )
