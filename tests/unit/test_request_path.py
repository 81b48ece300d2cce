"""The path of a small request: its types are the documented ones, and its calls in the gateway only become fewer.

A type on the path needs a reason, which `docs/explanation/request-lifecycle.md` states. Change that list on purpose.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

import argosy
from argosy.deployment import ReplicaConfig
from tests.support.metered_gateway import run_gateway_before

SOURCE = str(Path(argosy.__file__).parent)
DOCUMENT = Path(__file__).parents[2] / "docs" / "explanation" / "request-lifecycle.md"
MAX_CALLS = {"stream": 473, "buffered": 451}
"""Calls of Python functions of the package per request. Lower the numbers when they fall; never raise them."""
MAX_PROMPT_TYPES, MAX_TOKEN_TYPES = 13, 4

MODULES_ON_THE_PATH = (
    "argosy.constraints.output_constraint",
    "argosy.constraints.tools",
    "argosy.engine.engine_request",
    "argosy.engine.serving.core_messages",
    "argosy.engine.serving.preprocessing.output_planner",
    "argosy.engine.serving.preprocessing.prompt_tokenizer",
    "argosy.engine.serving.preprocessing.request_processor",
    "argosy.engine.serving.preprocessing.response_spec",
    "argosy.engine.serving.preprocessing.sampling_params",
    "argosy.engine.serving.text.choice",
    "argosy.engine.serving.text.detokenizer",
)
BESIDE_THE_PATH = {
    "argosy.constraints.output_constraint": {"JsonWhitespace", "Relaxation"},
    "argosy.constraints.tools": {"Tool", "ToolChoice"},
    "argosy.engine.engine_request": {"AdapterSource"},
    "argosy.engine.serving.core_messages": {
        *("AbortRequests", "CoreFailed", "CoreReady", "Heartbeat"),
        *("KvChange", "LoadProgress", "ShedMemory", "Shutdown"),
        *("SetSleepLevel", "SleepChanged"),
        *("AdapterReport", "LoadAdapter", "UnloadAdapter"),
    },
    "argosy.engine.serving.text.detokenizer": {"StopMatch"},
}
"""Records of these modules that hold neither a prompt nor a token: their parts, and messages about the core itself."""

BODY = b'{"model":"big","messages":[{"role":"user","content":"Hello"}],"max_tokens":2%b}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = (
    b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"big",'
    b'"choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b,"stop_reason":null}]}\n\n'
)
EVENTS = (
    b": argosy prompt 7 0\n\n",
    CHUNK % (b'{"role":"assistant","content":"Hi"}', b"null") + b": argosy 0 100\n\n",
    CHUNK % (b"{}", b'"length"') + b": argosy 0 101 length\n\n" + b"data: [DONE]\n\n",
    b"",
)
RESPONSE = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS)


class Replica(asyncio.Protocol):
    """A native replica that answers each generation at once. It uses no code of the package."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        is_generation = data.startswith(b"POST")
        missing = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
        self._transport.write(RESPONSE if is_generation else missing)


@dataclass
class PathTracer:
    """Profile function that counts the calls of the package, and finds the objects of its classes."""

    calls: int = 0
    seen: dict[int, object] = field(default_factory=dict)
    """Objects by id, which are kept so that no id is used again."""
    new: set[type] = field(default_factory=set)
    """Classes of the objects that no earlier request had."""

    def count(self, frame: FrameType, event: str, arg: object) -> None:
        del arg
        code = frame.f_code
        # Newer interpreters have no frames for comprehensions.
        if (
            event == "call"
            and code.co_filename.startswith(SOURCE)
            and not code.co_name.endswith("comp>")
        ):
            self.calls += 1

    def collect(self, frame: FrameType, event: str, arg: object) -> None:
        if event in {"call", "return"} and frame.f_code.co_filename.startswith(SOURCE):
            for each in (*frame.f_locals.values(), arg if event == "return" else None):
                cls = type(each)
                if cls.__module__.startswith("argosy.") and id(each) not in self.seen:
                    self.seen[id(each)] = each
                    self.new.add(cls)


Profile = Callable[[FrameType, str, Any], object]


@pytest.fixture(autouse=True)
def samples_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only the first request be read for the detection of changes. Others are not sampled for two seconds."""
    monkeypatch.setattr("argosy.gateway.proxy.traffic_sampler.INTERVAL_S", 3600.0)


async def trace_requests(folder: Path, mode: str) -> tuple[int, set[type]]:
    """Return the calls of one request, and the classes of which each request makes objects."""
    server = await asyncio.get_running_loop().create_server(Replica, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    body = BODY % (b',"stream":true' if mode == "stream" else b"")
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    end = b"\r\n0\r\n\r\n" if mode == "stream" else b"}"
    async with run_gateway_before(folder, ReplicaConfig(url=url, kind="argosy")) as gateway:
        for replica in gateway.running.replicas:
            replica.health.on_reported_state("ready", 0.0)
        address = gateway.running.client.base_url
        reader, writer = await asyncio.open_connection(address.host, address.port)

        async def send(profile: Profile | None) -> None:
            sys.setprofile(profile)
            writer.write(request)
            response = b""
            while not response.endswith(end):
                response += await reader.read(1 << 16)
            await gateway.running.wait_until_idle()
            sys.setprofile(None)
            assert response.startswith(b"HTTP/1.1 200 OK"), response

        await send(None)
        counts = []
        for _ in range(20):  # a response may arrive in more pieces
            counter = PathTracer()
            await send(counter.count)
            counts.append(counter.calls)
        tracer = PathTracer()
        for _ in range(2):
            tracer.new.clear()
            await send(tracer.collect)
        writer.close()
    server.close()
    classes = {cls for cls in tracer.new if not issubclass(cls, BaseException)}
    return min(counts), classes


def read_documented_types() -> dict[str, list[tuple[str, str]]]:
    """Return the names and modules of the rows of each table of the documentation, by the table's title."""
    section = DOCUMENT.read_text().split("## Types on the path")[1].split("\n## ")[0]
    return {
        title: re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", table, re.MULTILINE)
        for title, _, table in (each.partition("\n") for each in section.split("### "))
    }


def test_documented_types_exist_once_and_are_few() -> None:
    tables = read_documented_types()
    rows = [row for table in tables.values() for row in table]
    for name, module in rows:
        assert hasattr(importlib.import_module(module), name), (name, module)
    assert len({name for name, _ in rows}) == len(rows)
    assert len(tables["A prompt in the gateway"]) <= MAX_PROMPT_TYPES
    assert len(tables["A token in the gateway"]) <= MAX_TOKEN_TYPES


@pytest.mark.parametrize("module", MODULES_ON_THE_PATH)
def test_records_on_the_path_are_listed(module: str) -> None:
    rows = [row for table in read_documented_types().values() for row in table]
    classes = [
        each
        for each in vars(importlib.import_module(module)).values()
        if isinstance(each, type) and each.__module__ == module
    ]
    records = {
        cls.__name__
        for cls in classes
        if issubclass(cls, (tuple, msgspec.Struct)) or is_dataclass(cls)
    }
    listed = {name for name, place in rows if place == module}
    unlisted = records - listed - BESIDE_THE_PATH.get(module, set())
    assert not unlisted, "the page lacks these types: merge them into a listed one, or add them"


async def test_requests_make_objects_of_documented_types_only(tmp_path: Path) -> None:
    found: dict[str, str] = {}
    for mode in ("stream", "buffered"):
        _, classes = await trace_requests(tmp_path, mode)
        found |= {cls.__name__: cls.__module__ for cls in classes if cls.__name__[0] != "_"}
    tables = read_documented_types()
    assert found == dict(
        row for title, rows in tables.items() if title.endswith("in the gateway") for row in rows
    )


@pytest.mark.parametrize("mode", ["stream", "buffered"])
async def test_small_request_needs_no_more_calls_than_recorded(tmp_path: Path, mode: str) -> None:
    calls, _ = await trace_requests(tmp_path, mode)
    assert calls <= MAX_CALLS[mode]
