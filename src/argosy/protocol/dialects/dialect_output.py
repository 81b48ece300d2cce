"""Interface of the builders that turn a chat's output into a response of another dialect, streamed or whole."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from argosy.protocol.errors import ApiError
from argosy.protocol.openai_responses import TokenUsage
from argosy.protocol.sse import SSE_CONTENT_TYPE

CallKind = Literal["function", "custom"]
_SCHEMA = r"\bresponse_format\.json_schema\.schema\b"
_MAX_TOKENS = r"\bmax_(?:completion_)?tokens\b"  # also without quotes, in remedies
_TOOL = r"\b(tools\[\d+\])\.function"


class OutputIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a response."""

    id: str
    """Random digits, from which the ids of the response and of its items are derived."""
    created: int
    """Creation time in seconds since the epoch."""
    model: str


class DialectOutput(ABC):
    """Builder of one response.

    A stream and a whole response come from the same calls: a stream sends what `drain` returns after each call, and a
    whole response is `build_response` after the last call.
    """

    stream_content_type: bytes = SSE_CONTENT_TYPE

    starts_with_heartbeat = False
    """Whether the response has to start before the first heartbeat."""

    def __init__(self) -> None:
        self._unsent: list[bytes] = []

    def drain(self) -> bytes:
        """Return the encoded events since the last call."""
        events, self._unsent = b"".join(self._unsent), []
        return events

    @abstractmethod
    def start(self, identity: OutputIdentity, tokens: TokenUsage) -> None:
        """Start the response. Called once, before all other methods.

        Args:
            identity: Identity of the response.
            tokens: Tokens of the prompt as far as they are known: all or none.
        """

    @abstractmethod
    def add_reasoning(self, text: str) -> None:
        """Add text of the reasoning."""

    @abstractmethod
    def add_text(self, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        """Add text of the answer, with the log-probabilities of its tokens in the chat API's shape."""

    @abstractmethod
    def start_call(self, call_id: str, name: str, kind: CallKind) -> None:
        """Start a tool call."""

    @abstractmethod
    def add_call_text(self, text: str) -> None:
        """Add text of the last call's arguments, or of a custom tool's input."""

    @abstractmethod
    def finish(self, finish_reason: str, stop_reason: int | str | None, tokens: TokenUsage) -> None:
        """End the response, for reasons in the terms of the chat API."""

    @abstractmethod
    def fail(self, error: ApiError) -> None:
        """End a stream that has started with an error."""

    def heartbeat(self, event: bytes) -> bytes:
        """Return an event without content that keeps an idle stream alive for clients that ignore comments.

        Args:
            event: The one of the chat API, a chunk without choices.
        """
        return self.keepalive(event)

    def keepalive(self, comment: bytes) -> bytes:
        """Return what keeps an idle stream alive: the SSE comment, unless the dialect has something else."""
        return comment

    @abstractmethod
    def build_response(self) -> dict[str, Any]:
        """Build the whole response, after `finish`."""


def parse_call_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call for APIs that have an object there.

    Text that was cut or is no JSON object becomes the argument `arguments`.
    """
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


class FieldNames:
    """Renames the fields of a chat to those of a client's request.

    Args:
        rules: Regular expressions of names or paths, and their replacements. They are applied in this order.
    """

    def __init__(self, *rules: tuple[str, str]) -> None:
        self._rules = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def rename(self, error: ApiError) -> ApiError:
        """Return the error with the client's names."""
        param = None if error.param is None else self._replace(f"'{error.param}'")[1:-1]
        message = self._replace(error.message)
        return ApiError(error.status, error.code, message, param=param, details=error.details)

    def _replace(self, text: str) -> str:
        for pattern, replacement in self._rules:
            text = pattern.sub(replacement, text)
        return text


RESPONSES_FIELDS = FieldNames(
    # Without the index, because the chat has other messages than the input has items.
    (r"'messages(?:[\[.][^']*)?'", "'input'"),
    (_SCHEMA, "text.format.schema"),
    (r"\bresponse_format\b", "text.format"),
    (_MAX_TOKENS, "max_output_tokens"),
    (r"'reasoning_effort'", "'reasoning.effort'"),
    (_TOOL, r"\1"),
)
MESSAGES_FIELDS = FieldNames(
    (r"'stop(?=['\[])", "'stop_sequences"),
    (_SCHEMA, "output_config.format.schema"),
    (r"'reasoning_effort'", "'output_config.effort'"),
    (rf"{_TOOL}\.parameters", r"\1.input_schema"),
    (_TOOL, r"\1"),
)
OLLAMA_FIELDS = FieldNames(
    (_SCHEMA, "format"),
    (_MAX_TOKENS, "options.num_predict"),
    (r"'(stop|temperature|top_p|top_k|min_p|seed)(?=['\[])", r"'options.\1"),
    (r"'reasoning_effort'", "'think'"),
)
