"""`argosy chat`: a conversation in the terminal with a running server, over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.output import strip_control_characters
from argosy.cli.server_client import error_message, explain_connect_error, open_client

if TYPE_CHECKING:
    import httpx2

HELP_TEXT = "/quit exits, /clear starts a new conversation, Ctrl-C interrupts an answer."


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Parameters of every request of a conversation."""

    model: str
    max_tokens: int | None
    temperature: float

    def build_body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """Return the body of `POST /v1/chat/completions`."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "temperature": self.temperature,
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        return body


class ChatFailedError(Exception):
    """Raised if the server returns an error or ends a stream early. The message contains the reason."""


def chat(
    question: Annotated[
        str | None, typer.Argument(help="Send this message, print the answer and exit.")
    ] = None,
    *,
    url: Annotated[
        str, typer.Option(help="URL of the server, or unix:PATH.", envvar="ARGOSY_URL")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Model name; by default the server's first model.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    api_key: Annotated[
        str | None, typer.Option(help="Sent as a bearer token.", envvar="ARGOSY_API_KEY")
    ] = None,
) -> None:
    """Chat with a running server. Answers are streamed."""
    import httpx2

    initial_messages = [{"role": "system", "content": system}] if system else []
    with open_client(url, api_key) as client:
        try:
            settings = ChatSettings(model or _fetch_default_model(client), max_tokens, temperature)
            if question is not None:
                _print_answer(
                    client, settings, [*initial_messages, {"role": "user", "content": question}]
                )
            else:
                _run_conversation(client, settings, initial_messages)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            fail(
                f"no server answers at {url}: {explain_connect_error(error, 'start one with: argosy serve')}"
            )
        except httpx2.HTTPError as error:
            fail(f"the connection to {url} broke ({error}); see the server's log", EXIT_FAILURE)
        except ChatFailedError as error:
            fail(str(error))


def _fetch_default_model(client: httpx2.Client) -> str:
    import msgspec

    response = client.get("/v1/models")
    if response.status_code != 200:
        raise ChatFailedError(error_message(response.content))
    try:
        return str(msgspec.json.decode(response.content)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise ChatFailedError("the server does not speak the OpenAI API; check --url") from error


def _run_conversation(
    client: httpx2.Client, settings: ChatSettings, initial_messages: list[dict[str, str]]
) -> None:
    """Read messages from the terminal and print the answers, until end of input or `/quit`."""
    typer.secho(f"Chatting with {settings.model}. {HELP_TEXT}", err=True, dim=True)
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
        history.append({"role": "user", "content": line})
        try:
            answer = _print_answer(client, settings, history)
        except ChatFailedError as error:
            typer.secho(str(error), err=True, fg=typer.colors.RED)
            history.pop()
            continue
        history.append({"role": "assistant", "content": answer})


def _print_answer(
    client: httpx2.Client, settings: ChatSettings, messages: list[dict[str, str]]
) -> str:
    """Print an answer while it is streamed, and return it. Ctrl-C keeps the text received so far."""
    text: list[str] = []
    try:
        for delta in _stream_deltas(client, settings.build_body(messages)):
            text.append(delta)
            sys.stdout.write(strip_control_characters(delta))
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" [interrupted]")
    sys.stdout.write("\n")
    sys.stdout.flush()
    return "".join(text)


def _stream_deltas(client: httpx2.Client, body: dict[str, Any]) -> Iterator[str]:
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
                    yield choice["delta"].get("content") or ""
    raise ChatFailedError("the server ended the answer early; see its log")
