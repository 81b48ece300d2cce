"""Writer of a response that filters its texts, before another writer sends them to the client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from argosy.gateway.backends import MALFORMED_EVENT_ERRORS, check_container_count
from argosy.gateway.content_session import ChannelFilter, ContentSession
from argosy.gateway.proxy.response_writers import ResponseWriter
from argosy.gateway.request_context import RequestContext
from argosy.protocol import EVENT_END, event_data, format_event

STOPPED = "content_filter"
"""Finish reason of a choice that a match has ended."""
_REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Fields of equal text, of which a chunk may have one or both."""
_TEXT_FIELDS = ("content", "refusal", "text")
_ARGUMENT_FIELDS = {"function": "arguments", "custom": "input"}
_SECRET_FIELDS = ("token_ids", "prompt_token_ids", "prompt_logprobs")
"""Fields in which text that is removed could still be read."""
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
            field, index = name
            is_argument = index >= 0
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
        if field == "function_call":
            return {field: {"arguments": text}}
        return dict.fromkeys(_REASONING_FIELDS, text) if field == "reasoning" else {field: text}

    @property
    def is_stopped(self) -> bool:
        """Whether a match has ended the current text."""
        return self._filter is not None and self._filter.is_stopped


class ContentFilterWriter(ResponseWriter):
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
        self._writer = writer
        self._context = context
        self._session = session
        self._is_json = _has_json_output(context)
        self._choices: dict[int, _FilteredChoice] = {}

    @property
    def has_output(self) -> bool:  # type: ignore[override]
        return self._writer.has_output

    @property
    def is_full(self) -> bool:  # type: ignore[override]
        """Whether the response must end: by its size, or because a match has ended all choices."""
        finished = sum(each.is_finished for each in self._choices.values())
        return self._writer.is_full or finished == self._context.fields.choice_count

    @property
    def finish_reason(self) -> str:  # type: ignore[override]
        return self._writer.finish_reason if self._writer.is_full else STOPPED

    async def start(self) -> None:
        await self._writer.start()

    def start_early(self) -> None:
        self._writer.start_early()

    def send_keepalive(self) -> None:
        self._writer.send_keepalive()

    def send_progress(self, comment: bytes, event: bytes | None) -> None:
        self._writer.send_progress(comment, event)

    def discard(self) -> bool:
        is_discarded = self._writer.discard()
        if is_discarded:
            self._choices.clear()
        return is_discarded

    async def finish(self) -> None:
        await self._writer.finish()

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

    def filter_body(self, body: bytes) -> bytes:
        """Return a response in one piece with its texts filtered.

        Raises:
            ValueError: It is not a response.
        """
        try:
            response = _decode(body)
            for choice in response.get("choices", ()):
                state = self._choice(choice["index"])
                message = choice.get("message", choice)
                for holder, field, name in _find_texts(message):
                    text, rest = state.filter_text(name, holder[field])
                    assert rest is None  # noqa: S101 - each text was ended
                    is_stopped = state.is_stopped
                    tail = state.end_text()
                    holder[field] = text + _find_text(tail)
                    if is_stopped:
                        choice["finish_reason"] = STOPPED
                        if name[1] >= 0:
                            message.pop("tool_calls", None)
                        break
                _remove_secrets(choice)
            _remove_secrets(response)
        except MALFORMED_EVENT_ERRORS as error:
            raise ValueError(f"the response is malformed ({error})") from error
        return _encode(response)

    def _choice(self, index: int) -> _FilteredChoice:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _FilteredChoice(self._session, is_json=self._is_json)
        return choice

    def _filter_chunk(self, chunk: dict[str, Any]) -> Iterator[bytes]:
        """Yield the events that are sent in place of a chunk."""
        _remove_secrets(chunk)
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
            _remove_secrets(choice)
            has_delta = "delta" in choice
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
        for holder, field, name in _find_texts(choice.get("delta", choice)):
            text, rest = state.filter_text(name, holder[field])
            if rest is not None:
                before.append(rest)
            if name[0] == "reasoning":
                for each in _REASONING_FIELDS:
                    if holder.get(each):
                        holder[each] = text
            else:
                holder[field] = text
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


def _find_texts(delta: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, tuple[str, int]]]:
    """Yield each text of a delta or a message: what holds it, its field, and the name of the text."""
    for field in _REASONING_FIELDS:
        if delta.get(field):
            yield delta, field, ("reasoning", -1)
            break
    for field in _TEXT_FIELDS:
        if delta.get(field):
            yield delta, field, (field, -1)
    for at, call in enumerate(delta.get("tool_calls") or ()):
        for kind, field in _ARGUMENT_FIELDS.items():
            if call.get(kind) and call[kind].get(field):
                yield call[kind], field, (field, call.get("index", at))
    function_call = delta.get("function_call")
    if function_call and function_call.get("arguments"):
        yield function_call, "arguments", ("function_call", -1)


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
    return "".join(holder[field] for holder, field, _ in _find_texts(delta))


def _remove_secrets(holder: dict[str, Any]) -> None:
    """Remove log-probabilities and token ids, which would show text that the filters remove."""
    if holder.get("logprobs") is not None:
        holder["logprobs"] = None
    for field in _SECRET_FIELDS:
        if holder.get(field) is not None:
            holder[field] = None


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
