"""Requests by which a tenant with an ordinary key tries to hurt others: the attacks of `benchmarks.hostile_tenant`.

    python -m benchmarks.hostile_requests URL KEY SECONDS ATTACK [ATTACK ...]

Prints one JSON object: the number of requests by attack and outcome.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from msgspec.json import encode
from websockets.frames import Frame, Opcode

from benchmarks.hostile_grammars import hostile_fields
from benchmarks.processes import exit_on_sigterm
from benchmarks.server_process import MODEL

ALIAS = "claude-*-sonnet-*-latest"
"""Alias of the model with two wildcards, as an operator may set it."""
EMBEDDING_MODEL = "embeddings"
LARGE = 30_000_000
"""Size of large bodies. The gateway accepts 32 MiB."""
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CONNECTION_ERRORS = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
LEXER_PATTERN = "((.*[a-m].{20})|(.*[g-q].{21})|(.*[h-z].{22}))qN"
"""Expression whose automaton has as many states as the engine permits."""
DEAD_END_PATTERN = "(.*[aeiou].{12}){4}"


class Attacker:
    """Client that reads as much of the responses as an attack wants."""

    def __init__(self, url: str, key: str, until: float) -> None:
        address = urlsplit(url)
        self._address = str(address.hostname), int(address.port or 80)
        self._key = key
        self._until = until
        self.outcomes: Counter[str] = Counter()

    async def run(self, name: str) -> None:
        """Run the workers of one attack, or clients of the model with this name."""
        attack = ATTACKS.get(name) or Attack(functools.partial(send_to_model, model=name), 2)

        async def work(number: int) -> None:
            while (remaining_s := self._until - time.monotonic()) > 0:
                outcome = "until the end"
                try:
                    async with asyncio.timeout(remaining_s):
                        outcome = await attack.attempt(self, number)
                except TimeoutError:
                    pass
                except CONNECTION_ERRORS as error:
                    outcome = type(error).__name__
                    await asyncio.sleep(0.05)
                self.outcomes[f"{name}: {outcome}"] += 1
                number += attack.workers

        await asyncio.gather(*(work(number) for number in range(attack.workers)))

    @contextlib.asynccontextmanager
    async def connection(
        self, path: str, body: bytes = b"", *headers: str, length: int | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Send a request on a new connection, and yield its reader and writer. The connection is reset at the end."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        client.setblocking(False)  # noqa: FBT003 - the parameter has no name
        try:
            await asyncio.get_running_loop().sock_connect(client, self._address)
            reader, writer = await asyncio.open_connection(sock=client, limit=1 << 16)
        except BaseException:
            client.close()
            raise
        try:
            writer.write(self.head(path, len(body) if length is None else length, *headers) + body)
            yield reader, writer
        finally:
            writer.transport.abort()

    def head(self, path: str, length: int, *headers: str) -> bytes:
        """Return the head of a POST request, or with `headers` of a GET request without a body."""
        if headers:
            lines = [f"GET {path} HTTP/1.1", "host: x", *headers]
        else:
            lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {length}"]
            lines += ["content-type: application/json", "connection: close"]
        return "\r\n".join([*lines, f"authorization: Bearer {self._key}", "", ""]).encode()

    async def send(self, path: str, body: bytes, max_bytes: int = sys.maxsize) -> str:
        """Send a request, read up to `max_bytes` of its response, and return its status."""
        async with self.connection(path, body) as (reader, _):
            status = await _read_status(reader)
            while max_bytes > 0 and (data := await reader.read(1 << 16)):
                max_bytes -= len(data)
            return status

    def chat(self, **fields: object) -> bytes:
        """Return the body of a chat that streams until it is long."""
        prompt = f"Tell me a story about {random.getrandbits(40)}."
        body: dict[str, object] = {"model": MODEL, "max_tokens": 400, "ignore_eos": True}
        body |= {"messages": [{"role": "user", "content": prompt}], "stream": True, **fields}
        return encode(body)


async def _read_status(reader: asyncio.StreamReader) -> str:
    return (await reader.readuntil(b"\r\n")).split()[1].decode()


# --- attacks ---------------------------------------------------------------------------------------


async def send_choices(attacker: Attacker, _: int) -> str:
    """Take as many slots as one request can."""
    return await attacker.send(CHAT, attacker.chat(n=64, max_tokens=2000))


async def send_prompts(attacker: Attacker, _: int) -> str:
    """Fill the KV cache with prompts as long as the model's context."""
    text = " ".join(str(random.getrandbits(16)) for _ in range(1200))
    messages = [{"role": "user", "content": text}]
    return await attacker.send(CHAT, attacker.chat(messages=messages, max_tokens=1000))


@functools.cache
def grammars() -> list[bytes]:
    """Return the fields of the attacks on grammars, as JSON without braces."""
    fields = [
        *hostile_fields().values(),
        {"structured_outputs": {"regex": LEXER_PATTERN}},
        {"structured_outputs": {"regex": DEAD_END_PATTERN}},
    ]
    return [encode(each)[1:-1] for each in fields]


async def send_grammars(attacker: Attacker, number: int) -> str:
    """Send schemas, expressions and tools that are expensive to compile or to follow."""
    if number % 3 == 0:  # each time another one, so that no cache has it
        pattern = LEXER_PATTERN.replace("qN", f"q{number}")
        fields = encode({"structured_outputs": {"regex": pattern}})[1:-1]
    else:
        fields = grammars()[number % len(grammars())]
    return await attacker.send(CHAT, attacker.chat(max_tokens=64)[:-1] + b"," + fields + b"}")


def _filled(before: str, unit: str, after: str) -> bytes:
    """Return JSON of the size `LARGE`, which repeats `unit` between two parts."""
    return (before + unit * (LARGE // len(unit)) + after).encode()


@functools.cache
def large_bodies() -> list[tuple[str, bytes]]:
    """Return large bodies with their paths."""
    model, user = f'{{"model": "{MODEL}", ', '{"role": "user", "content": "a"}'
    text, embedding = "word " * 200, f'{{"model": "{EMBEDDING_MODEL}", '
    message = '"messages": [{"role": "user", "content": "'
    return [
        (CHAT, _filled(f"{model}{message}", "word ", '"}]}')),
        (CHAT, _filled(f"{model}{message}", "\\u0041", '"}]}')),
        (CHAT, _filled(f"{model}{message}", "\u00e4", '"}]}')),
        (CHAT, _filled(f'{model}"messages": [', f"{user}, ", f"{user}]}}")),
        (CHAT, _filled(f'{model}"messages": [{user}], "metadata": {{"a": "', "x", '"}}')),
        (CHAT, _filled(f'{model}"messages": ', "[", "")),
        (CHAT, _filled(f'{model}"messages": [{user}], "tools": [', "{},", "{}]}")),
        (COMPLETIONS, _filled(f'{model}"prompt": [', "17,", "17]}")),
        (COMPLETIONS, _filled(f'{model}"prompt": [', '"a",', '"a"]}')),
        (COMPLETIONS, _filled(f'{model}"prompt": [', "[1],", "[1]]}")),
        (RESPONSES, _filled(f'{model}"input": "', "word ", '"}')),
        (RESPONSES, _filled(f'{model}"input": [', f"{user}, ", f"{user}]}}")),
        ("/v1/messages", _filled(f'{model}"max_tokens": 4, {message}', "word ", '"}]}')),
        (
            "/v1/messages",
            _filled(f'{model}"max_tokens": 4, "messages": [', f"{user},", f"{user}]}}"),
        ),
        ("/v1/messages/count_tokens", _filled(f"{model}{message}", "word ", '"}]}')),
        ("/api/chat", _filled(f'{model}"messages": [', f"{user}, ", f"{user}]}}")),
        ("/api/generate", _filled(f'{model}"prompt": "', "word ", '"}')),
        ("/tokenize", _filled(f'{model}"prompt": "', "word ", '"}')),
        ("/detokenize", _filled(f'{model}"tokens": [', "17,", "17]}")),
        ("/v1/embeddings", _filled(f'{embedding}"input": [', f'"{text}",', '"a"]}')),
        ("/v1/embeddings", _filled(f'{embedding}"input": [', '"a",', '"a"]}')),
        (
            "/v1/embeddings",
            _filled(f'{embedding}"truncate_prompt_tokens": 9, "input": "', "a ", '"}'),
        ),
        ("/v1/rerank", _filled(f'{embedding}"query": "a", "documents": [', '"a",', '"a"]}')),
        ("/v2/embed", _filled(f'{embedding}"texts": [', '"a",', '"a"]}')),
        (CHAT, b"\x00" * LARGE),
    ]


async def send_bodies(attacker: Attacker, number: int) -> str:
    """Send large bodies to each endpoint."""
    path, body = large_bodies()[number % len(large_bodies())]
    return f"{number % len(large_bodies())} {path} {await attacker.send(path, body)}"


async def send_slow_bodies(attacker: Attacker, _: int) -> str:
    """Send half of a large body, and then one byte each second."""
    async with attacker.connection(CHAT, b"[" * (LARGE // 2), length=LARGE) as (reader, writer):
        while not reader.at_eof():
            writer.write(b"[")
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    return await _read_status(reader)
    return "closed"


def _handshake() -> list[str]:
    key = base64.b64encode(os.urandom(16)).decode()
    return [
        *("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13"),
        f"sec-websocket-key: {key}",
    ]


async def send_frames(attacker: Attacker, number: int) -> str:
    """Open a WebSocket, and send pings or requests without reading anything."""
    if number % 2:
        message = encode({"type": "response.create", "model": MODEL, "input": "a" * 1000})
        frame = Frame(Opcode.TEXT, message)
    else:
        frame = Frame(Opcode.PING, b"x" * (125 if number % 4 else 0))
    frames = frame.serialize(mask=True) * 500
    async with attacker.connection(RESPONSES, b"", *_handshake()) as (reader, writer):
        if (status := await _read_status(reader)) != "101":
            return status
        while not reader.at_eof() and not writer.transport.is_closing():
            writer.write(frames)
            await writer.drain()
    return "closed"


async def send_background(attacker: Attacker, _: int) -> str:
    """Start responses that run without a connection."""
    fields = {"model": MODEL, "input": "Tell me a story.", "max_output_tokens": 4000}
    return await attacker.send(RESPONSES, encode(fields | {"background": True}))


@functools.cache
def embedding_batches() -> list[bytes]:
    """Return bodies with as many and as long inputs as are permitted."""
    inputs = [["word " * 1000] * 500, ["a"] * 1024, [" ".join(map(str, range(2000)))] * 64]
    return [encode({"model": EMBEDDING_MODEL, "input": each}) for each in inputs]


async def send_embeddings(attacker: Attacker, number: int) -> str:
    """Send batches of inputs."""
    return await attacker.send("/v1/embeddings", embedding_batches()[number % 3])


@functools.cache
def conversation() -> bytes:
    """Return the body of a conversation that is as large as permitted."""
    item = {"type": "message", "role": "user", "content": "word " * (LARGE // 100)}
    return encode({"items": [item] * 20})


async def send_conversations(attacker: Attacker, _: int) -> str:
    """Store conversations."""
    return await attacker.send("/v1/conversations", conversation())


async def send_cancelled(attacker: Attacker, _: int) -> str:
    """Leave streams at their first tokens."""
    return await attacker.send(CHAT, attacker.chat(n=4, max_tokens=2000), max_bytes=600)


async def send_names(attacker: Attacker, number: int) -> str:
    """Send names of models that begin as the alias does, up to some megabytes long."""
    name = "claude-" + "-sonnet-" * (50_000 * (number % 10 + 1)) + "-lates"
    return await attacker.send(CHAT, attacker.chat(model=name))


async def send_slow_readers(attacker: Attacker, number: int) -> str:
    """Read nothing of a long stream, or of many answers on one connection."""
    fields: dict[str, Any] = {"n": 8, "logprobs": True, "top_logprobs": 20, "max_tokens": 2000}
    async with attacker.connection(CHAT, attacker.chat(**fields)) as (_, writer):
        if number % 2:
            for _ in range(1000):
                writer.write(attacker.head("/v1/models", 0, "accept: */*"))
        await asyncio.sleep(20.0)
    return "left"


async def send_to_model(attacker: Attacker, number: int, *, model: str) -> str:
    """Use a model whose servers behave badly."""
    body = attacker.chat(model=model, stream=number % 2 == 0, max_tokens=20)
    return await attacker.send(CHAT, body, max_bytes=4_000_000)


async def send_tokenize(attacker: Attacker, number: int) -> str:
    """Tokenize megabytes of text."""
    prompt = random.randbytes(500_000).hex() if number % 2 else "word " * 200_000
    return await attacker.send("/tokenize", encode({"model": MODEL, "prompt": prompt}))


class Attack(NamedTuple):
    """Attack that several workers repeat."""

    attempt: Callable[[Attacker, int], Awaitable[str]]
    """Makes one attempt, and returns its outcome. The number differs for each attempt."""
    workers: int


ATTACKS: dict[str, Attack] = {
    "choices": Attack(send_choices, 8),
    "prompts": Attack(send_prompts, 40),
    "grammars": Attack(send_grammars, 8),
    "bodies": Attack(send_bodies, 8),
    "slow bodies": Attack(send_slow_bodies, 60),
    "websockets": Attack(send_frames, 8),
    "background": Attack(send_background, 16),
    "embeddings": Attack(send_embeddings, 8),
    "conversations": Attack(send_conversations, 2),
    "cancelled": Attack(send_cancelled, 16),
    "names": Attack(send_names, 4),
    "slow readers": Attack(send_slow_readers, 60),
    "tokenize": Attack(send_tokenize, 8),
}


async def attack(url: str, key: str, seconds: float, names: list[str]) -> Counter[str]:
    """Run attacks at once, and return the number of attempts by attack and outcome."""
    attacker = Attacker(url, key, time.monotonic() + seconds)
    await asyncio.gather(*(attacker.run(name) for name in names))
    return attacker.outcomes


def main() -> None:
    """Print the outcomes."""
    url, key, seconds, *names = sys.argv[1:]
    exit_on_sigterm()
    os.nice(10)  # the attacker's own machine is another one
    print(json.dumps(asyncio.run(attack(url, key, float(seconds), names))))


if __name__ == "__main__":
    main()
