"""Printing of a streamed answer in the terminal, and its message for the conversation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from argosy.cli.output import strip_control_characters
from argosy.cli.server_client import error_message

if TYPE_CHECKING:
    import httpx2

Message = dict[str, Any]


class ChatFailedError(Exception):
    """Raised if the server returns an error or ends a stream early. The message contains the reason."""


class AnswerPrinter:
    """Prints one answer while it is streamed, and collects it: reasoning, text and tool calls."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._block = ""
        """Part of the answer that is being printed."""

    def print_answer(self, client: httpx2.Client, body: dict[str, Any]) -> Message:
        """Send a request, print the answer and return it as a message. Ctrl-C keeps the output received so far."""
        try:
            for delta in _stream_deltas(client, body):
                self._print_delta(delta)
        except KeyboardInterrupt:
            sys.stdout.write(" [interrupted]")
            self._calls.clear()  # their arguments may be incomplete
        sys.stdout.write("\n")
        sys.stdout.flush()
        message: Message = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _print_delta(self, delta: dict[str, Any]) -> None:
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning:
            self._reasoning.append(reasoning)
            self._write("reasoning", reasoning, dim=True)
        if delta.get("content"):
            self._content.append(delta["content"])
            self._write("content", delta["content"])
        for call in delta.get("tool_calls") or ():
            self._print_call(call)
        sys.stdout.flush()

    def _print_call(self, delta: dict[str, Any]) -> None:
        kind = "custom" if "custom" in delta else "function"
        field = "input" if kind == "custom" else "arguments"
        index, part = delta.get("index", 0), delta.get(kind) or {}
        if index == len(self._calls):
            self._calls.append({"id": delta["id"], "type": kind, kind: {"name": "", field: ""}})
            self._write(f"call {index}", f"-> {part.get('name', '')} ", dim=True)
        call = self._calls[index][kind]
        call["name"] += part.get("name") or ""
        call[field] += part.get(field) or ""
        self._write(f"call {index}", part.get(field) or "")

    def _write(self, block: str, text: str, *, dim: bool = False) -> None:
        """Write text of a block: reasoning, content, or one call. Each block begins on a new line."""
        if text and block != self._block:
            sys.stdout.write("\n" if self._block else "")
            self._block = block
        shown = strip_control_characters(text)
        if dim:
            typer.secho(shown, nl=False, dim=True)
        else:
            sys.stdout.write(shown)


def _stream_deltas(client: httpx2.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import msgspec

    from argosy.protocol import EventParser

    parser = EventParser()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise ChatFailedError(error_message(response.read()))
        for chunk in response.iter_bytes():
            for data in parser.feed(chunk):
                if data == b"[DONE]":
                    return
                event = msgspec.json.decode(data)
                if event.get("error"):
                    raise ChatFailedError(error_message(data))
                for choice in event["choices"]:
                    yield choice["delta"]
    raise ChatFailedError("the server ended the answer early; see its log")
