"""Reader of a chat's or completion's response that feeds a `DialectOutput`, one tool call after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from argosy.protocol.dialects.dialect_output import (
    CallKind,
    DialectOutput,
    OutputIdentity,
)
from argosy.protocol.errors import ApiError
from argosy.protocol.openai_responses import NO_TOKENS, TokenUsage
from argosy.protocol.sse import EventParser

_Action = Callable[[], None]
_DONE = b"[DONE]"
_STATUS_BY_ERROR_TYPE = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "rate_limit_error": 429,
    "overloaded_error": 503,
    "timeout_error": 504,
}


class CallSerializer:
    """Passes a chat's output on to a builder, one tool call after the other.

    A server may send the deltas of parallel calls in any order. What follows a call waits until its arguments are a
    whole JSON object, or until the end if it is a custom tool's, whose input may be any text.

    Args:
        output: The builder.
    """

    def __init__(self, output: DialectOutput) -> None:
        self.output = output
        self._open_call: int | None = None
        """Index of the call that receives its text directly, None for text."""
        self._waiting: list[tuple[int | None, _Action]] = []
        """Output that follows the open call, by the index of its call."""
        self._arguments: dict[int, list[str]] = {}
        """Parts of each function's arguments so far."""

    def add_reasoning(self, text: str) -> None:
        """Add text of the reasoning."""
        self._add(None, partial(self.output.add_reasoning, text))

    def add_text(self, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        """Add text of the answer."""
        self._add(None, partial(self.output.add_text, text, logprobs))

    def start_call(self, index: int, call_id: str, name: str, kind: CallKind) -> None:
        """Start the tool call with this index."""
        if kind == "function":
            self._arguments[index] = []
        self._add(index, partial(self.output.start_call, call_id, name, kind))

    def add_call_text(self, index: int, text: str) -> None:
        """Add text of a call's arguments, or of a custom tool's input."""
        if index in self._arguments:
            self._arguments[index].append(text)
        self._add(index, partial(self.output.add_call_text, text))

    def release_all(self) -> None:
        """Pass on all that waits, since nothing will follow."""
        self._release(is_end=True)

    def _add(self, owner: int | None, action: _Action) -> None:
        is_open = owner == self._open_call or self._open_call is None
        if is_open:
            self._open_call = owner
            action()
        else:
            self._waiting.append((owner, action))
        # The open call may be complete now, or what arrives first after it asks whether it is.
        if self._waiting and (is_open or len(self._waiting) == 1) and self._is_complete():
            self._release()

    def _release(self, *, is_end: bool = False) -> None:
        """Pass on what waits, until a call that may be incomplete is the open one."""
        while self._waiting:
            self._open_call = owner = self._waiting[0][0]
            for other, action in self._waiting:
                if other == owner:
                    action()
            self._waiting = [entry for entry in self._waiting if entry[0] != owner]
            if not is_end and not self._is_complete():
                return

    def _is_complete(self) -> bool:
        """Return whether the open call cannot receive more text."""
        if self._open_call is None:
            return True
        parts = self._arguments.get(self._open_call)
        if not parts or not parts[-1].rstrip().endswith("}"):
            return False
        try:
            return isinstance(msgspec.json.decode("".join(parts)), dict)
        except (msgspec.DecodeError, RecursionError):
            return False


class _CallBody(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None
    input: str | None = None


class _Call(msgspec.Struct, gc=False):
    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: _CallBody | None = None
    custom: _CallBody | None = None


class _Message(msgspec.Struct, gc=False):
    """Message of a whole response, or the delta of a stream."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Message | None = None
    message: _Message | None = None
    text: str | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _TokenDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None
    completion_tokens_details: _TokenDetails | None = None

    def to_tokens(self) -> TokenUsage:
        prompt, output = self.prompt_tokens_details, self.completion_tokens_details
        return TokenUsage(
            self.prompt_tokens or 0,
            (prompt.cached_tokens or 0) if prompt else 0,
            self.completion_tokens or 0,
            output.reasoning_tokens if output else None,
        )


class _Error(msgspec.Struct, gc=False):
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _Chunk(msgspec.Struct, gc=False):
    """Whole response, or one event of a stream."""

    model: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class ChatOutputReader:
    """Feeds a builder with the first choice of a response. Other choices are ignored.

    Args:
        output: The builder.
        identity: Identity of the response. Its model applies to a response that names none.
    """

    def __init__(self, output: DialectOutput, identity: OutputIdentity) -> None:
        self._output = CallSerializer(output)
        self._identity = identity
        self._events = EventParser()
        self._has_started = False
        self.has_ended = False
        """Whether the response has ended or failed."""
        self._started_calls: set[int] = set()
        """Indexes of the tool calls so far."""
        self._finish_reason = ""
        self._stop_reason: int | str | None = None
        self._tokens = NO_TOKENS

    def read_events(self, data: bytes) -> None:
        """Read a part of a stream of server-sent events.

        Raises:
            ValueError: An event is no chunk of a chat.
        """
        for event in self._events.feed(data):
            if self.has_ended:
                return
            if event == _DONE:
                self._end()
            else:
                self._read(_decode_chunk(event))

    def read_response(self, body: bytes) -> None:
        """Read a whole response.

        Raises:
            ValueError: The body is no response of a chat.
        """
        self._read(_decode_chunk(body))
        if not self.has_ended:
            self._end()

    def _read(self, chunk: _Chunk) -> None:
        if chunk.error is not None:
            self._fail(chunk.error)
            return
        if chunk.usage is not None:
            self._tokens = chunk.usage.to_tokens()
        self.start(chunk.model)
        for choice in chunk.choices:
            if choice.index == 0:
                self._read_choice(choice)

    def start(self, model: str = "") -> None:
        """Start the response, unless it has started."""
        if self._has_started:
            return
        self._has_started = True
        identity = self._identity
        self._output.output.start(
            msgspec.structs.replace(identity, model=model or identity.model), self._tokens
        )

    def _read_choice(self, choice: _Choice) -> None:
        message = choice.delta or choice.message
        text = choice.text or ""
        if message is not None:
            if reasoning := message.reasoning_content or message.reasoning:
                self._output.add_reasoning(reasoning)
            text = message.content or message.refusal or text
        logprobs = (choice.logprobs.content or ()) if choice.logprobs else ()
        if text or logprobs:
            self._output.add_text(text, logprobs)
        if message is not None:
            for position, call in enumerate(message.tool_calls or ()):
                self._read_call(call, position)
        if choice.finish_reason is not None:
            self._finish_reason, self._stop_reason = choice.finish_reason, choice.stop_reason

    def _read_call(self, call: _Call, position: int) -> None:
        index = position if call.index is None else call.index
        body = call.custom or call.function or _CallBody()
        if index not in self._started_calls:
            self._started_calls.add(index)
            kind: CallKind = "function" if call.custom is None else "custom"
            self._output.start_call(index, call.id or f"call_{index}", body.name or "", kind)
        if text := body.arguments or body.input:
            self._output.add_call_text(index, text)

    def _end(self) -> None:
        self.has_ended = True
        self.start()
        self._output.release_all()
        self._output.output.finish(self._finish_reason or "stop", self._stop_reason, self._tokens)

    def _fail(self, error: _Error | str) -> None:
        self.has_ended = True
        self.start()
        self._output.release_all()
        self._output.output.fail(_to_api_error(error))


def read_text(body: bytes) -> tuple[str, TokenUsage]:
    """Return the text and the token counts of a whole response. Raises ValueError if it is no response of a chat."""
    chunk = _decode_chunk(body)
    message = (chunk.choices[0].message if chunk.choices else None) or _Message()
    tokens = NO_TOKENS if chunk.usage is None else chunk.usage.to_tokens()
    return message.content or message.refusal or "", tokens


def parse_error_body(status: int, body: bytes) -> ApiError:
    """Parse the body of an error response. An unknown shape gives an error without a useful message."""
    try:
        found = _decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    error = _to_api_error(found or "")
    error.status = status
    error.message = error.message or f"The request failed with status {status}."
    return error


def _decode_chunk(data: bytes) -> _Chunk:
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"an event is malformed ({error})") from error


def _to_api_error(error: _Error | str) -> ApiError:
    if isinstance(error, str):
        return ApiError(500, "", error)
    status = _STATUS_BY_ERROR_TYPE.get(error.type or "", 500)
    return ApiError(status, str(error.code or ""), error.message, param=error.param)
