"""Reads the stream of a server that keeps no journal, so that another server can go on where it stops.

Each event is taken in before it is passed on: what text it told, and with which token ids if the server gives
them. What was asked for only for that is taken out again, so the client gets what it would have got from the server.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import msgspec

from argosy.gateway.backends.backend_adapter import CHAT_PATH
from argosy.gateway.backends.emitted_choice import Told, encode
from argosy.gateway.backends.native_stream_parser import Delivered
from argosy.gateway.backends.passthrough import Tokens, Usage, tokens_of
from argosy.gateway.backends.stream_events import (
    DONE,
    END,
    UNREADABLE,
    cut,
    data_of,
    error_of,
    is_error,
    status_of,
)
from argosy.gateway.backends.stream_parser import StreamReader
from argosy.protocol import SSE_DONE, Unended

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_SAID = frozenset({"role", "content"})


@dataclass(frozen=True, slots=True)
class View:
    """What the client sees of what was asked for, and how the server tells it."""

    usage: bool
    """The usage at the end: the client asked for it."""
    usage_with_each: bool
    """The usage that events carry: the client asked for it, or nobody did."""
    ids: bool
    """Token ids: the client asked for them."""
    broken_off: frozenset[str]
    """Finish reasons of answers that are none."""
    timings: bool
    """Timings with each event: the same."""
    completion: bool
    """It comes as a completion although the answer is a chat."""
    seam: str
    """White space at the end of what was told, which may be told again."""
    least_tokens: int
    """Tokens before which no stop string counts."""
    again: str
    """All that was told, where it may come again, with what stood before it: see `Told.ends_whole`."""


class ChunkReader(StreamReader):
    """One attempt's stream."""

    def __init__(self, told: Told, delivered: Delivered, view: View) -> None:
        self._told = told
        self._delivered = delivered
        self._view = view
        self._seam = view.seam
        self._again = view.again
        self._goes_on = told.first is not None
        self._before = told.tokens
        self._head = told.head()
        self._rest = Unended()

    def feed(self, body: bytes) -> bytes:
        """See `StreamReader`."""
        if self.done or self.failure:
            return b""
        whole = cut(self._rest, body)
        passed = b"".join(self._event(event) for event in whole.split(END)[:-1])
        told, delivered = self._told, self._delivered
        delivered.output_tokens = told.tokens
        delivered.prompt_tokens = told.prompt_tokens or delivered.prompt_tokens
        delivered.cached_tokens = min(told.cached_tokens, delivered.prompt_tokens)
        return passed

    def take_held(self) -> bytes:
        """See `StreamReader`."""
        told = self._told
        if not self.over or told.usage_told or not self._view.usage:
            return SSE_DONE
        told.prompt_tokens = self._delivered.prompt_tokens  # about so many, where no server told
        return told.usage_event() + SSE_DONE

    def _event(self, event: bytes) -> bytes:
        if self.done or self.failure:
            return b""
        data = data_of(event)
        if data is None:
            return event + END
        if data == DONE:
            self.done = True
            return b""
        try:
            chunk = _decode(data)
            if is_error(chunk):
                self.failure, self.status = error_of(chunk), status_of(chunk)
                return b""
            changed = self._take_in(chunk)
        except UNREADABLE as error:
            self.failure = f"an event of its stream cannot be read ({error})"
            return b""
        if changed is None:
            return b""
        return encode(chunk) if changed or self._goes_on else event + END

    def _take_in(self, chunk: dict[str, Any]) -> bool | None:
        """Note what a chunk tells, and make it what the client gets: was it changed? None: it gets nothing."""
        told, usage = self._told, msgspec.convert(chunk.get("usage"), Usage | None)
        choices = chunk.get("choices")
        if not choices:
            if usage is None:
                return False
            self._count(chunk, usage)
            told.usage_told = True
            chunk.update(self._head)
            return False if self._view.usage else None
        choice = choices[0]
        if choice.get("finish_reason") in self._view.broken_off:
            self.failure = "it broke the answer off"
            return None
        if self._view.completion:
            choice["delta"] = {"content": choice.pop("text")}
            choice.pop("prompt_token_ids", None)
        said, brought = self._text_of(choice), len(choice.get("token_ids") or ())
        made = self._take_timings(chunk, choice)
        counted = made or (usage is not None and usage.completion_tokens is not None)
        changed = self._take_ids(chunk, choice, counted=counted) or made or bool(told.gate)
        if usage is not None:
            self._count(chunk, usage)
            if not self._view.usage_with_each:
                chunk["usage"] = None
                changed = True
        if said:
            told.says(brought)
        text, more = self._take_text(choice)
        finishes = bool(choice.get("finish_reason"))  # some send "" until then
        shown = text or more or finishes or (self._view.ids and choice.get("token_ids"))
        if self._goes_on and not shown:
            return None  # the role, or an empty beginning: it was told before
        if finishes:
            told.finished = True
            told.usage_told = chunk.get("usage") is not None
            self._delivered.finished[0] = str(choice["finish_reason"])
        if told.first is None:
            told.first = chunk
        chunk.update(self._head)
        return changed

    def _text_of(self, choice: dict[str, Any]) -> str | None:
        """The text of a choice. Raises TypeError when it is none: before it counts as something that was told."""
        text = (
            choice["delta"].get("content") if self._told.path == CHAT_PATH else choice.get("text")
        )
        if not isinstance(text, str | None):
            raise TypeError("its text is none")
        return text

    def _take_text(self, choice: dict[str, Any]) -> tuple[str, bool]:
        """Note the text of a choice. What is new of it, and whether there is more than text."""
        told, holder, name, more = self._told, choice, "text", False
        if told.path == CHAT_PATH:
            holder, name = choice["delta"], "content"
            more = any(holder[said] for said in holder.keys() - _SAID)
        came = holder.get(name) or ""
        text = self._pass_gate(self._join(came), choice)
        if text != came:
            holder[name] = text
        if text:
            told.text.append(text)
        told.only_text = told.only_text and not more
        return text, more

    def _pass_gate(self, text: str, choice: dict[str, Any]) -> str:
        """What the client gets of the text where the gateway keeps the stop strings."""
        gate = self._told.gate
        if gate is None:
            return text
        if self._goes_on and self._before >= self._view.least_tokens:
            ended = gate.end_across(text)
            if ended is not None:
                self.done = self.over = True
                text, choice["stop_reason"] = ended
                choice["finish_reason"] = "stop"
                return text
        if choice.get("finish_reason"):
            return gate.end(text, choice.get("stop_reason"))
        return gate.pass_on(text)

    def _join(self, text: str) -> str:
        """The text without what it tells again."""
        if text and self._again:
            _, _, text = text.rpartition(self._again)
            self._again = ""
        while self._seam and text:
            if text[0] != self._seam[0]:
                self._seam = ""
                break
            text, self._seam = text[1:], self._seam[1:]
        return text

    def _take_ids(self, chunk: dict[str, Any], choice: dict[str, Any], *, counted: bool) -> bool:
        """Note the token ids that came, and take them out unless the client asked for them."""
        told = self._told
        prompt = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if prompt and told.prompt_ids is None:
            told.prompt_ids = self._delivered.prompt_ids = array("I", prompt)
            told.prompt_tokens = len(prompt)
        ids = choice.get("token_ids")
        if ids is not None:
            told.ids += ids
            told.tokens += len(ids)
            choice["token_ids"] = told.show(len(ids)) if self._view.ids else None
        elif self._says(choice):
            told.has_ids = False
            said = choice["delta"].values() if told.path == CHAT_PATH else (choice["text"],)
            told.tokens += 0 if counted else tokens_of(*said)
        if (self._view.ids and not self._goes_on) or (ids is None and not prompt):
            return False
        for holder in (chunk, choice):  # the prompt's were told before, or nobody asked
            if "prompt_token_ids" in holder:
                holder["prompt_token_ids"] = None
        return True

    def _take_timings(self, chunk: dict[str, Any], choice: dict[str, Any]) -> bool:
        """Whether it tells how many tokens were made. At its end a server tells that unasked."""
        timings = chunk.get("timings")
        if not isinstance(timings, dict) or "predicted_n" not in timings:
            return False
        if not (self._view.timings or choice.get("finish_reason")):
            del chunk["timings"]
        self._told.tokens = self._before + msgspec.convert(timings["predicted_n"], Tokens)
        return True

    def _says(self, choice: dict[str, Any]) -> bool:
        """Whether it tells more than whose turn it is."""
        if self._told.path == CHAT_PATH:
            return any(said for name, said in choice["delta"].items() if name != "role")
        return bool(choice["text"])

    def _count(self, chunk: dict[str, Any], usage: Usage) -> None:
        """Believe the server's count; after another server, for its own part."""
        told, prompt = self._told, usage.prompt_tokens or 0
        if usage.completion_tokens is not None:
            told.tokens = self._before + usage.completion_tokens
        if not self._before:
            told.prompt_tokens = prompt or told.prompt_tokens
            told.cached_tokens = usage.cached_tokens
            return
        told.prompt_tokens = told.prompt_tokens or max(0, prompt - self._before)
        chunk["usage"] |= told.usage()
        if chunk["usage"].get("prompt_tokens_details") is not None:  # of a longer prompt
            chunk["usage"]["prompt_tokens_details"] = {"cached_tokens": told.cached_tokens}
