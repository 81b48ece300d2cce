"""`argosy chat`: a conversation in the terminal with a running server, over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argosy.cli.failure import fail
from argosy.cli.output import strip_control_characters
from argosy.cli.server_client import (
    DEFAULT_URL,
    OTHER_API,
    ServerApiKey,
    ServerUrl,
    error_message,
    fail_without_server,
    fetch_default_model,
    open_client,
)

if TYPE_CHECKING:
    import httpx2

HELP_TEXT = "/quit exits, /clear starts a new conversation, Ctrl-C interrupts an answer."
MAX_TOOL_ROUNDS = 20
"""Number of answers with tool calls after which a question is given up."""
Message = dict[str, Any]


def chat(
    question: Annotated[
        str | None, typer.Argument(help="Send this message, print the answer and exit.")
    ] = None,
    *,
    url: ServerUrl = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option(help="Model name; by default the server's first model.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    tools: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with a list of tools. You are asked for the result of each call."
        ),
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(help="JSON Schema file that the answers have to match.")
    ] = None,
    reasoning_effort: Annotated[
        str | None, typer.Option(help="none, minimal, low, medium, high, xhigh or max.")
    ] = None,
    api_key: ServerApiKey = None,
) -> None:
    """Chat with a running server. Answers are streamed."""
    options = _body_options(max_tokens, temperature, tools, schema, reasoning_effort)
    initial_messages: list[Message] = [{"role": "system", "content": system}] if system else []
    with open_client(url, api_key) as client, fail_without_server(url):
        try:
            request = {"model": model or fetch_default_model(client), "stream": True, **options}
            if question is not None:
                _answer(client, request, [*initial_messages, _user_message(question)])
            else:
                _run_conversation(client, request, initial_messages)
        except ChatFailedError as error:
            fail(str(error))


def _body_options(
    max_tokens: int | None,
    temperature: float,
    tools: Path | None,
    schema: Path | None,
    reasoning_effort: str | None,
) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": temperature}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if tools is not None:
        options["tools"] = _read_json(tools, list, "a list of tools")
    if schema is not None:
        json_schema = {"name": "answer", "schema": _read_json(schema, dict, "a JSON Schema")}
        options["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    if reasoning_effort is not None:
        options["reasoning_effort"] = reasoning_effort
    return options


def _read_json(file: Path, type_: type, description: str) -> Any:  # noqa: ANN401 - depends on `type_`
    import msgspec

    try:
        return msgspec.json.decode(file.read_bytes(), type=type_)
    except (OSError, msgspec.DecodeError) as error:
        fail(f"{file} is not a file with {description} ({error}); correct it")


def _user_message(text: str) -> Message:
    return {"role": "user", "content": text}


def _run_conversation(
    client: httpx2.Client, request: dict[str, Any], initial_messages: list[Message]
) -> None:
    """Read messages from the terminal and print the answers, until end of input or `/quit`."""
    typer.secho(f"Chatting with {request['model']}. {HELP_TEXT}", err=True, dim=True)
    history = list(initial_messages)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo(err=True)
            return
        match line:
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/clear":
                history = list(initial_messages)
                continue
            case _ if line.startswith("/"):
                typer.secho(HELP_TEXT, err=True, dim=True)
                continue
        try:
            history = _answer(client, request, [*history, _user_message(line)])
        except ChatFailedError as error:
            typer.secho(str(error), err=True, fg=typer.colors.RED)


def _answer(
    client: httpx2.Client, request: dict[str, Any], messages: list[Message]
) -> list[Message]:
    """Print the answer to a conversation, and return the conversation with it.

    The user is asked for the result of each tool call, and the model continues with it.
    """
    for _ in range(MAX_TOOL_ROUNDS):
        message = AnswerPrinter().print_answer(client, {**request, "messages": messages})
        messages = [*messages, message]
        calls = message.get("tool_calls")
        if not calls:
            return messages
        try:
            messages += [_ask_for_result(call) for call in calls]
        except (EOFError, KeyboardInterrupt):
            typer.echo(err=True)
            return messages
    raise ChatFailedError(f"the model has called tools {MAX_TOOL_ROUNDS} times without an answer")


def _ask_for_result(call: dict[str, Any]) -> Message:
    name = (call.get("function") or call.get("custom") or {}).get("name", "tool")
    return {"role": "tool", "tool_call_id": call["id"], "content": input(f"{name} returns> ")}


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
        import msgspec

        try:
            for delta in _stream_deltas(client, body):
                self._print_delta(delta)
        except KeyboardInterrupt:
            sys.stdout.write(" [interrupted]")
            self._calls.clear()  # their arguments may be incomplete
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
            raise ChatFailedError(OTHER_API) from error
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
