"""Writer of a response that filters its texts, before another writer sends them to the client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from argosy.gateway.backends import MALFORMED_EVENT_ERRORS, check_container_count
from argosy.gateway.content_session import ChannelFilter, ContentSession
from argosy.gateway.proxy.response_writers import ResponseWriter, WrappingWriter
from argosy.gateway.request_context import RequestContext
from argosy.protocol import EVENT_END, event_data, format_event

STOPPED = "content_filter"
"""Finish reason of a choice that a match has ended."""
_REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Fields of equal text, of which a chunk may have one or both."""
_TEXT_FIELDS = ("content", "refusal", "text")
_ARGUMENT_FIELDS = {"function": "arguments", "custom": "input"}
_CHUNK_FIELDS = frozenset(
    {
        *("id", "object", "created", "model", "choices", "usage", "system_fingerprint"),
        *("service_tier", "warnings"),
    }
)
_CHOICE_FIELDS = frozenset({"index", "delta", "message", "text", "finish_reason", "stop_reason"})
_MESSAGE_FIELDS = frozenset(
    {"role", *_REASONING_FIELDS, *_TEXT_FIELDS, "tool_calls", "function_call"}
)
"""Fields that pass. Others may repeat text that is removed: log-probabilities, token ids, audio, extras of engines."""
_DONE = b"[DONE]"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class _FilteredChoice:
    """Filters of one choice. A text is complete when another one of the choice begins, or the choice ends."""

    def __init__(self, session: ContentSession, *, is_json: bool) -> None:
        self.is_finished = False
        self._session = session
        self._is_json = is_json
        self._name: tuple[str, int] | None = None
        """Field of the current text, with the index of a tool call."""
        self._filter: ChannelFilter | None = None

    def filter_text(self, name: tuple[str, int], text: str) -> tuple[str, dict[str, Any] | None]:
        """Filter a piece of the text in a field.

        Returns:
            What is decided of it, and a delta with the rest of the text before it if that has ended.
        """
        rest = None
        if name != self._name:
            rest = self.end_text()
            field, _ = name
            is_argument = field in _ARGUMENT_FIELDS.values()
            is_json = field == "arguments" or (self._is_json and field in {"content", "text"})
            self._name = name
            self._filter = self._session.create_filter(is_json=is_json, is_argument=is_argument)
        assert self._filter is not None  # noqa: S101 - created with the first text
        return self._filter.feed(text), rest

    def end_text(self) -> dict[str, Any] | None:
        """Return a delta with the rest of the current text, which has ended; None if it is empty."""
        if self._filter is None or self._name is None:
            return None
        text = self._filter.flush()
        field, index = self._name
        self.is_finished = self.is_finished or self._filter.is_stopped
        self._filter.close()
        self._name = self._filter = None
        if not text:
            return None
        if index >= 0:
            kind = "function" if field == "arguments" else "custom"
            return {"tool_calls": [{"index": index, kind: {field: text}}]}
        if field == "arguments":
            return {"function_call": {field: text}}
        return dict.fromkeys(_REASONING_FIELDS, text) if field == "reasoning" else {field: text}

    @property
    def is_stopped(self) -> bool:
        """Whether a match has ended the current text."""
        return self._filter is not None and self._filter.is_stopped


class ContentFilterWriter(WrappingWriter):
    """Response writer that filters the texts of a response and passes its events on to another writer."""

    def __init__(
        self, writer: ResponseWriter, context: RequestContext, session: ContentSession
    ) -> None:
        """Create the writer of a response.

        Args:
            writer: Sends the filtered events.
            context: The request.
            session: The filters of the request.
        """
        super().__init__(writer)
        self._context = context
        self._session = session
        self._is_json = _has_json_output(context)
        self._choices: dict[int, _FilteredChoice] = {}

    @property
    def is_full(self) -> bool:  # type: ignore[override]
        """Whether the response must end: by its size, or because a match has ended all choices."""
        finished = sum(each.is_finished for each in self._choices.values())
        return self._writer.is_full or finished == self._context.fields.choice_count

    @property
    def finish_reason(self) -> str:  # type: ignore[override]
        return self._writer.finish_reason if self._writer.is_full else STOPPED

    def discard(self) -> bool:
        is_discarded = self._writer.discard()
        if is_discarded:
            self._choices.clear()
        return is_discarded

    def close(self) -> None:
        for choice in self._choices.values():
            choice.end_text()
        self._writer.close()

    def write_events(self, events: bytes) -> None:
        """Filter events and pass them on.

        Raises:
            ValueError: An event is not a chunk of a response.
        """
        check_container_count(events)
        output: list[bytes] = []
        for event in events.removesuffix(EVENT_END).split(EVENT_END):
            data = event_data(event)
            if data is None or data == _DONE:
                output.append(event + EVENT_END)
                continue
            try:
                output += self._filter_chunk(_decode(data))
            except MALFORMED_EVENT_ERRORS as error:
                raise ValueError(f"an event is malformed ({error})") from error
        if output:
            self._writer.write_events(b"".join(output))

    async def filter_body(self, body: bytes) -> bytes:
        """Return a response in one piece with its texts filtered.

        Raises:
            ValueError: It is not a response.
        """
        try:
            response = _decode(body)
            if "choices" not in response:  # of a model that generates nothing
                return body
            _remove_unknown(response, _CHUNK_FIELDS)
            for choice in response["choices"]:
                _remove_unknown(choice, _CHOICE_FIELDS)
                self._filter_message(choice)
        except MALFORMED_EVENT_ERRORS as error:
            raise ValueError(f"the response is malformed ({error})") from error
        return _encode(response)

    def _filter_message(self, choice: dict[str, Any]) -> None:
        """Filter the texts of a choice in one piece in place."""
        state, message = self._choice(choice["index"]), choice.get("message", choice)
        if message is not choice:
            _remove_unknown(message, _MESSAGE_FIELDS)
        for holder, field, name in list(find_texts(message)):
            text = ""
            if not state.is_finished:
                text, _ = state.filter_text(name, holder[field])
                text += _find_text(state.end_text())
            _set_text(holder, field, name, text)
        if state.is_finished:
            choice["finish_reason"] = STOPPED
            # Calls before the match may be cut, too, and a cut one is no JSON.
            for field in ("tool_calls", "function_call"):
                message.pop(field, None)

    def _choice(self, index: int) -> _FilteredChoice:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _FilteredChoice(self._session, is_json=self._is_json)
        return choice

    def _filter_chunk(self, chunk: dict[str, Any]) -> Iterator[bytes]:
        """Yield the events that are sent in place of a chunk."""
        if "error" not in chunk:
            _remove_unknown(chunk, _CHUNK_FIELDS)
        choices = chunk.get("choices")
        if not choices:
            yield format_event(_encode(chunk))
            return
        passed_on = []
        for choice in choices:
            index = choice["index"]
            state = self._choice(index)
            if state.is_finished:
                continue
            _remove_unknown(choice, _CHOICE_FIELDS)
            has_delta = "delta" in choice
            if has_delta:
                _remove_unknown(choice["delta"], _MESSAGE_FIELDS)
            for delta in self._filter_choice(state, choice):
                extra = {
                    "index": index,
                    "logprobs": None,
                    "finish_reason": None,
                    "stop_reason": None,
                }
                yield _format_chunk(chunk, extra | ({"delta": delta} if has_delta else delta))
            if state.is_finished and choice["finish_reason"] is None:
                choice["finish_reason"], choice["stop_reason"] = STOPPED, None
            passed_on.append(choice)
        if passed_on:
            chunk["choices"] = passed_on
            yield format_event(_encode(chunk))

    def _filter_choice(
        self, state: _FilteredChoice, choice: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Filter a chunk's part of a choice in place. Returns deltas that are to be sent before it."""
        before = []
        for holder, field, name in find_texts(choice.get("delta", choice)):
            text, rest = state.filter_text(name, holder[field])
            if rest is not None:
                before.append(rest)
            _set_text(holder, field, name, text)
            if state.is_stopped:
                # No text after the match may leave, nor any other text of this chunk.
                state.end_text()
                state.is_finished = True
                _keep_only(choice.get("delta", choice), name, text)
                return before
        if choice.get("finish_reason") is not None:
            rest = state.end_text()
            if rest is not None:
                before.append(rest)
            state.is_finished = True
        return before


def find_texts(delta: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, tuple[str, int]]]:
    """Yield each text of a delta or a message: what holds it, its field, and the name of the text."""
    for field in _REASONING_FIELDS:
        if delta.get(field):
            yield delta, field, ("reasoning", -1)
            break
    for field in _TEXT_FIELDS:
        value = delta.get(field)
        if isinstance(value, list):  # parts, as some engines send them
            texts = [part["text"] for part in value if part.get("type") == "text"]
            delta[field] = value = "".join(texts)
        if value:
            yield delta, field, (field, -1)
    for at, call in enumerate(delta.get("tool_calls") or ()):
        for kind, field in _ARGUMENT_FIELDS.items():
            if call.get(kind) and call[kind].get(field):
                yield call[kind], field, (field, call.get("index", at))
    function_call = delta.get("function_call")
    if function_call and function_call.get("arguments"):
        yield function_call, "arguments", ("arguments", -1)


def _set_text(holder: dict[str, Any], field: str, name: tuple[str, int], text: str) -> None:
    """Replace a text that `find_texts` has found."""
    for each in _REASONING_FIELDS if name[0] == "reasoning" else (field,):
        if holder.get(each):
            holder[each] = text


def _keep_only(delta: dict[str, Any], name: tuple[str, int], text: str) -> None:
    """Remove all texts of a delta but the one with this name."""
    for field in (*_REASONING_FIELDS, *_TEXT_FIELDS, "tool_calls", "function_call"):
        is_kept = field == name[0] or (name[0] == "reasoning" and field in _REASONING_FIELDS)
        if field in delta and not (is_kept and text):
            delta[field] = "" if field == "text" else None


def _find_text(delta: dict[str, Any] | None) -> str:
    """Return the text in a delta of `_FilteredChoice.end_text`."""
    if delta is None:
        return ""
    return "".join(holder[field] for holder, field, _ in find_texts(delta))


def _remove_unknown(holder: dict[str, Any], known: frozenset[str]) -> None:
    """Remove the fields of an object that are not known to be free of removed text."""
    for field in holder.keys() - known:
        del holder[field]
    if "finish_reason" in holder:
        holder["logprobs"] = None  # clients expect the field in a choice


def _format_chunk(chunk: dict[str, Any], choice: dict[str, Any]) -> bytes:
    """Return an event like a chunk, with one choice."""
    fields = {name: value for name, value in chunk.items() if name not in {"choices", "usage"}}
    return format_event(_encode(fields | {"choices": [choice]}))


def _has_json_output(context: RequestContext) -> bool:
    """Whether the answer is to be a JSON document."""
    raw = context.fields.raw.get("response_format")
    if raw is None:
        return False
    try:
        return str(_decode(raw).get("type", "")).startswith("json")
    except MALFORMED_EVENT_ERRORS:
        return False
