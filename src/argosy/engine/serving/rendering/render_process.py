"""Process that compiles and renders chat templates within bounds of CPU time, memory and output.

`template_renderer` starts it as `python -m argosy.engine.serving.rendering.render_process DESCRIPTOR`. A template is a
program. It may loop for hours without releasing the GIL, or allocate all memory, so it runs in no other process.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from argosy.engine.serving.process_limits import limit_resources
from argosy.engine.serving.rendering.render_protocol import (
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    MAX_OUTPUT_CHARS,
    SIZE_BYTES,
    SLOW_CPU_S,
    SLOW_NICENESS,
    ReplyKind,
    frame,
)

MAX_ERROR_CHARS = 1000
"""Longest error message in characters."""


class TemplateRaisedError(jinja2.TemplateError):
    """Error of a template's `raise_exception`. Its message is meant for the client."""


def create_environment() -> ImmutableSandboxedEnvironment:
    """Create the environment, an immutable sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # the output is a prompt, not HTML
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["dict"] = _DictConstructor()
    return environment


def find_free_variables(environment: ImmutableSandboxedEnvironment, source: str) -> set[str]:
    """Return the variables that a template reads and does not set itself."""
    return meta.find_undeclared_variables(environment.parse(source))


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks training targets. Rendering ignores the tag."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag (Jinja's hook for extensions)."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _DictConstructor:
    """The name `dict` of a template: makes mappings, but hides the type, whose subscript is callable too."""

    def __call__(self, *items: Any, **entries: Any) -> dict[Any, Any]:  # noqa: ANN401 - as `dict` takes them
        return dict(*items, **entries)

    def fromkeys(self, keys: Iterable[Any], value: object = None) -> dict[Any, Any]:
        """Return a mapping of each key to `value`."""
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRaisedError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - signature that templates call
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - the same
) -> str:
    """Serialize to JSON without the HTML escaping of Jinja's own `tojson`."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class RenderRequest(NamedTuple):
    """Request to compile or to render a template, sent as a tuple."""

    digest: str
    """Identifies the template."""
    source: str | None
    """Jinja source. None for a template that this process has compiled."""
    variables: dict[str, Any] | None
    """Variables to render with. None asks only for the names of the free variables of `source`."""
    now: datetime | None
    """Local time for `strftime_now`."""


class _OutputLimitError(Exception):
    """The output exceeds `MAX_OUTPUT_CHARS`."""


class RenderProcess:
    """Main loop: one request at a time, each with one reply."""

    def __init__(self, parent: socket.socket) -> None:
        self._parent = parent
        self._environment = create_environment()
        self._templates: dict[str, jinja2.Template] = {}

    def run(self) -> None:
        """Serve until the parent closes the socket."""
        signal.signal(signal.SIGVTALRM, self._on_slow)
        requests = self._parent.makefile("rb")
        with contextlib.suppress(ConnectionError):
            while size := int.from_bytes(requests.read(SIZE_BYTES), "little"):
                payload = requests.read(size)
                with _bounded_cpu_time():
                    reply = self._reply(payload)
                self._parent.sendall(reply)

    def _reply(self, payload: bytes) -> bytes:
        try:
            return _encode("text", self._handle(payload))
        except jinja2.TemplateSyntaxError as error:
            problem = f"line {error.lineno}: {error.message}"
        except TemplateRaisedError as error:
            problem = str(error)
        except MemoryError:
            return _encode("memory")
        except _OutputLimitError:
            return _encode("output")
        except RecursionError:
            problem = "the messages are nested too deeply"
        except Exception as error:  # noqa: BLE001 - a template is a program: it can raise anything
            problem = f"{type(error).__name__}: {error}"
        return _encode("failed", problem[:MAX_ERROR_CHARS])

    def _handle(self, payload: bytes) -> str:
        request = RenderRequest(*pickle.loads(payload))  # noqa: S301 - from our own parent
        if request.source is not None:
            self._templates[request.digest] = self._environment.from_string(request.source)
        if request.variables is None:
            names = find_free_variables(self._environment, request.source or "")
            return "\n".join(sorted(names))
        signal.setitimer(signal.ITIMER_VIRTUAL, SLOW_CPU_S)
        variables = dict(request.variables)
        if request.now is not None:
            variables["strftime_now"] = request.now.strftime
        return _render(self._templates[request.digest], variables)

    def _on_slow(self, _signal: int, _frame: FrameType | None) -> None:
        os.nice(SLOW_NICENESS)
        self._parent.sendall(_encode("slow"))


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    pieces, size = [], 0
    for piece in template.generate(variables):
        size += len(piece)
        if size > MAX_OUTPUT_CHARS:
            raise _OutputLimitError
        pieces.append(piece)
    return "".join(pieces)


def _encode(kind: ReplyKind, text: str = "") -> bytes:
    return frame(f"{kind}\n{text}".encode("utf-8", "surrogatepass"))


@contextlib.contextmanager
def _bounded_cpu_time() -> Iterator[None]:
    """Let the kernel end this process if the context takes more than `MAX_CPU_S`, whatever code runs in it."""
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> NoReturn:
    """Serve the parent whose socket has the descriptor in the arguments."""
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        process = RenderProcess(parent)
        limit_resources(MAX_MEMORY_BYTES)
        process.run()
    os._exit(0)


if __name__ == "__main__":
    main()
