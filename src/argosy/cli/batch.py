"""`argosy batch`: the requests of a file, answered by a model of this machine or by a running server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer
from typer import Option

from argosy.cli import batch_jobs
from argosy.cli.failure import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, fail
from argosy.cli.replica_options import with_replica_options
from argosy.cli.server_client import (
    ServerApiKey,
    fail_without_server,
    fetch_default_model,
    open_client,
)
from argosy.process import create_socket_folder, format_os_error, kill_with_parent
from argosy.progress_bar import ProgressBar

if TYPE_CHECKING:
    import httpx2

MAX_LINE_BYTES = 32 * 1024 * 1024
"""Longest line of a batch. Servers take no larger bodies."""
TAIL_BYTES = 65_536
"""Size of the pieces in which the end of the last complete line is searched."""
LOOKAHEAD = 8
"""Lines that may wait for an earlier one to be written, for each line that is being answered."""
ENDPOINTS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
    }
)
"""Paths that lines of a batch may name."""
SEEDED = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths whose requests have a seed."""
RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0)
"""Waits before further attempts at a request, if the server names no time."""
MAX_RETRY_S = 60.0
"""Longest wait that a server may ask for. After a longer one, as for a budget of the month, the request has failed."""
REQUEST_TIMEOUT_S = 3600.0
"""Longest time without a byte of a response."""
READY_INTERVAL_S = 0.1
"""Seconds between two checks whether the model is loaded."""
STOP_TIMEOUT_S = 10.0
"""Seconds within which the replica of this command has to exit at its end."""
SOCKET_NAME = "replica.sock"
NO_REPLICA_OPTIONS = (
    *("host", "port", "uds", "model", "log_name", "digest", "colocated_replicas"),
    *("api_key", "zone", "label", "drain_deadline"),
)
"""Options of a replica that have no meaning for one that only this command reaches."""

app = typer.Typer(
    no_args_is_help=True,
    help="Answer the requests of a file, here or in the free slots of a running gateway.",
)
for _name, _command in (
    ("create", batch_jobs.create),
    ("list", batch_jobs.list_batches),
    ("wait", batch_jobs.wait),
    ("cancel", batch_jobs.cancel),
):
    app.command(_name)(_command)


class BatchLine(msgspec.Struct, frozen=True):
    """Request of a batch, in the format of OpenAI's Batch API."""

    custom_id: Annotated[str, msgspec.Meta(max_length=512)]
    url: str
    body: dict[str, Any]
    method: str = "POST"


class ServerLostError(Exception):
    """The server no longer answers. What was answered is written, so that the command can continue there."""


class BatchFiles(NamedTuple):
    """Input with the results so far, which are those of its first lines."""

    lines: Iterator[bytes]
    """Lines without a result."""
    output: IO[bytes]
    errors: IO[bytes]
    """Where lines without a successful response go; `output` by default."""
    num_done: int
    """Lines that have one."""
    done_bytes: int
    """Size of these lines; 0 if it is not known."""
    is_complete: bool
    """Whether all lines have one."""
    num_failed: int
    """Lines whose result is no successful response."""
    input_bytes: int | None
    """Size of the whole input; None if it is not known."""


@app.command("run")
@with_replica_options(omitted=NO_REPLICA_OPTIONS, defaults={"log_level": "warning"})
def run(
    options: Mapping[str, Any],
    *,
    context: typer.Context,  # noqa: ARG001 - every command with these options gets it
    input_file: Annotated[
        str,
        Option(
            "--input-file",
            "-i",
            metavar="FILE",
            help="Requests, one JSON object a line; - for standard input.",
        ),
    ],
    output_file: Annotated[
        str,
        Option(
            "--output-file",
            "-o",
            metavar="FILE",
            help="Responses, in the order of the requests; - for standard output. A file that has the first ones"
            " already is continued.",
        ),
    ],
    errors_file: Annotated[
        str | None,
        Option(
            "--errors",
            metavar="FILE",
            help="Where requests without a successful response go; by default to the output.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        Option(
            help="Model to load for these requests: a path or a name. The bundled one by default."
        ),
    ] = None,
    url: Annotated[
        str | None,  # not from ARGOSY_URL, since by default the command loads a model
        Option(
            help="URL of a server that answers, or unix:PATH, instead of a model of this command."
        ),
    ] = None,
    api_key: ServerApiKey = None,
    concurrency: Annotated[
        int, Option(min=1, max=4096, help="Requests that are sent at a time.")
    ] = 64,
) -> None:
    """Answer a file of requests in the format of OpenAI's Batch API, like vLLM's `run-batch`.

    Exits with 0 if all requests succeeded, 1 if one failed, 2 if nothing could be started.
    """
    given = [name for name in options if name != "log_level"]
    if url and (model or given):
        name = "model" if model else given[0].replace("_", "-")
        fail(
            f"--{name} is for a model of this command, and --url names a server; leave one of both out"
        )
    if output_file == "-" and errors_file is None and sys.stdout.isatty():
        fail("the results would fill the terminal; name a file with --output-file")
    try:
        with contextlib.ExitStack() as stack:
            files = open_files(stack, input_file, output_file, errors_file)
            _show_results(files)
            num_failed = files.num_failed
            if not files.is_complete:
                address = url or stack.enter_context(_start_replica(model, options))
                num_failed = asyncio.run(_answer(files, address, api_key, concurrency))
    except ServerLostError as error:
        fail(f"{error}; run the same command again to continue", EXIT_FAILURE)
    except ValueError as error:
        fail(str(error))
    except OSError as error:
        fail(format_os_error(error))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if num_failed:
        where = errors_file or output_file
        fail(f"{num_failed} requests failed; their errors are in {where}", EXIT_FAILURE)


def _show_results(files: BatchFiles) -> None:
    """Print how many lines have results, if some have."""
    if files.num_done:
        left = "none is left" if files.is_complete else "the run continues after them"
        typer.echo(f"{files.num_done:,} lines have results already; {left}.", err=True)


def open_files(
    stack: contextlib.ExitStack, input_file: str, output_file: str, errors_file: str | None
) -> BatchFiles:
    """Open the files, and skip the lines of the input whose results exist.

    A last line of a result file without its end is cut off: a run was killed while it wrote.

    Raises:
        OSError: A file cannot be opened.
        ValueError: The results are those of another input.
    """
    source, input_bytes = sys.stdin.buffer, None
    if input_file != "-":
        source = stack.enter_context(Path(input_file).open("rb"))  # noqa: SIM115 - entered
        input_bytes = os.fstat(source.fileno()).st_size
    names = [output_file] if errors_file is None else [output_file, errors_file]
    results = [stack.enter_context(_open_results(name)) for name in names]
    lines = _read_lines(source)
    num_done = num_failed = 0
    for is_success in _match_results(lines, [*map(_read_results, results)], names):
        num_done += 1
        num_failed += not is_success
    done_bytes = 0 if input_bytes is None else source.tell()
    first = next(lines, None)
    rest = itertools.chain([] if first is None else [first], lines)
    return BatchFiles(
        rest, results[0], results[-1], num_done, done_bytes, first is None, num_failed, input_bytes
    )


def _match_results(
    lines: Iterator[bytes], results: Sequence[Iterator[_Result]], names: Sequence[str]
) -> Iterator[bool]:
    """Take the first lines, whose results are in the files, and yield for each whether it succeeded.

    All files are in the order of the lines.

    Raises:
        ValueError: A result belongs to none of these lines.
    """
    heads = [next(each, None) for each in results]
    while any(heads):
        line = next(lines, None)
        custom_id = None if line is None else find_custom_id(line)
        for index, head in enumerate(heads):
            if head is not None and head.custom_id == custom_id:
                heads[index] = next(results[index], None)
                yield head.is_success
                break
        else:
            name = next(name for name, head in zip(names, heads, strict=True) if head)
            raise ValueError(
                f"{name} has results of other requests than the input; name another file, or remove it"
            )


def _open_results(file: str) -> IO[bytes]:
    if file == "-":
        return os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    result = Path(file).open("a+b")  # noqa: SIM115 - the caller closes it
    end = result.seek(0, os.SEEK_END)
    found = -1
    while end and found < 0:
        start = max(0, end - TAIL_BYTES)
        result.seek(start)
        found = result.read(end - start).rfind(b"\n")
        end = start + found + 1
    result.truncate(end)
    return result


def _read_results(file: IO[bytes]) -> Iterator[_Result]:
    """Yield the results in a file; none of standard output."""
    if file.readable():
        file.seek(0)
        yield from map(_parse_result, file)


def _read_lines(source: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines that are not empty. One that is too long is cut, so that it is no JSON."""
    while line := source.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            while not line.endswith(b"\n") and (rest := source.readline(MAX_LINE_BYTES)):
                line = line[:MAX_LINE_BYTES] + rest[-1:]
        if line := line.strip():
            yield line


class _Result(msgspec.Struct):
    """Identity of a request or of its result, and how the result ended."""

    custom_id: str = ""
    response: dict[str, Any] | None = None

    @property
    def is_success(self) -> bool:
        return self.response is not None and 200 <= self.response.get("status_code", 0) < 300


def find_custom_id(line: bytes) -> str:
    """Return the id of a request; empty if it has none."""
    return _parse_result(line).custom_id


def _parse_result(line: bytes) -> _Result:
    try:
        return msgspec.json.decode(line, type=_Result)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Result()


class _BatchRun:
    """Answers lines, a bounded number at a time, and writes the results in the order of the lines."""

    def __init__(
        self, client: httpx2.AsyncClient, files: BatchFiles, concurrency: int, model: str
    ) -> None:
        self._client = client
        self._files = files
        self._slots = asyncio.Semaphore(concurrency)
        self._max_window = concurrency * LOOKAHEAD
        self._model = model
        """Model of requests that name none."""
        self.num_failed = files.num_failed

    async def answer(self, progress: ProgressBar) -> None:
        """Answer all lines.

        Raises:
            OSError: A result cannot be written.
            ServerLostError: The server does not answer.
        """
        window: deque[tuple[asyncio.Task[tuple[bytes, bool]], int]] = deque()
        try:
            for number, line in enumerate(self._files.lines, self._files.num_done + 1):
                await self._slots.acquire()
                window.append((asyncio.create_task(self._answer_line(number, line)), len(line)))
                while window[0][0].done() or len(window) >= self._max_window:
                    await self._write_first(window, progress)
                    if not window:
                        break
            while window:
                await self._write_first(window, progress)
        finally:
            for task, _ in window:
                task.cancel()
            await asyncio.gather(*(task for task, _ in window), return_exceptions=True)

    async def _write_first(
        self, window: deque[tuple[asyncio.Task[tuple[bytes, bool]], int]], progress: ProgressBar
    ) -> None:
        task, size = window[0]
        result, is_success = await task
        window.popleft()
        self.num_failed += not is_success
        file = self._files.output if is_success else self._files.errors
        file.write(result + b"\n")
        file.flush()
        progress.update(advance=size, note=f"{self.num_failed} failed" if self.num_failed else "")

    async def _answer_line(self, number: int, line: bytes) -> tuple[bytes, bool]:
        """Return the result of a line, and whether its request succeeded."""
        try:
            request = parse_line(number, line)
            body = {"model": self._model, **request.body}
            if request.url in SEEDED:
                # The same line gives the same bytes again.
                digest = hashlib.sha256(b"%d %b" % (number, request.custom_id.encode())).digest()
                body.setdefault("seed", int.from_bytes(digest[:4]))
            return await self._send(request, msgspec.json.encode(body), number)
        except InvalidLineError as error:
            return _encode_error(find_custom_id(line), number, error.code, str(error)), False
        finally:
            self._slots.release()

    async def _send(self, request: BatchLine, body: bytes, number: int) -> tuple[bytes, bool]:
        import httpx2

        delays_s = iter(RETRY_DELAYS_S)
        while True:
            try:
                response = await self._client.post(request.url, content=body)
            except httpx2.HTTPError as error:
                delay_s = next(delays_s, None)
                if delay_s is None:
                    reason = str(error) or type(error).__name__
                    raise ServerLostError(f"line {number} got no response: {reason}") from error
            else:
                delay_s = _choose_delay(response, delays_s)
                if delay_s is None:
                    return _encode_response(request, number, response)
            await asyncio.sleep(delay_s)


def _choose_delay(response: httpx2.Response, delays_s: Iterator[float]) -> float | None:
    """Return the seconds until the next attempt; None if the response is final.

    A limit of the server (429) delays a request as often as it has to.
    """
    if response.status_code not in RETRIED_STATUSES:
        return None
    value = response.headers.get("retry-after", "")
    asked_s = float(value) if value.isdecimal() else None
    if asked_s is not None and asked_s > MAX_RETRY_S:
        return None
    if response.status_code == 429 and asked_s is not None:
        return asked_s
    delay_s = next(delays_s, None)
    return delay_s if delay_s is None or asked_s is None else max(delay_s, asked_s)


class InvalidLineError(ValueError):
    """Raised for a line that is no request of a batch."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse_line(number: int, line: bytes) -> BatchLine:
    """Return the request in a line.

    Raises:
        InvalidLineError: It is none. The message names the line and what to change.
    """
    try:
        request = msgspec.json.decode(line, type=BatchLine)
    except msgspec.ValidationError as error:
        message = f"line {number}: {error}; write custom_id, method, url and body as OpenAI's Batch API has them"
        raise InvalidLineError("missing_required_parameter", message) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"line {number} is no JSON object of at most {MAX_LINE_BYTES} bytes ({error})"
        raise InvalidLineError("invalid_json_line", message) from error
    if request.method != "POST":
        message = f"line {number}: the method is {request.method[:20]!r}; write POST"
        raise InvalidLineError("invalid_method", message)
    if request.url not in ENDPOINTS:
        message = f"line {number}: the url is {request.url[:100]!r}; use one of {', '.join(sorted(ENDPOINTS))}"
        raise InvalidLineError("invalid_url", message)
    if request.body.get("stream"):
        message = f"line {number}: a batch has no streams; remove stream"
        raise InvalidLineError("stream_unsupported", message)
    return request


def _encode_response(
    request: BatchLine, number: int, response: httpx2.Response
) -> tuple[bytes, bool]:
    try:
        body = msgspec.json.encode(msgspec.json.decode(response.content, type=dict[str, Any]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = f"the server answered with status {response.status_code} and no JSON object; check the address"
        return _encode_error(request.custom_id, number, "invalid_response", message), False
    result = {
        "id": _result_id(request.custom_id, number),
        "custom_id": request.custom_id,
        "response": {
            "status_code": response.status_code,
            "request_id": response.headers.get("x-request-id", ""),
            "body": msgspec.Raw(body),
        },
        "error": None,
    }
    return msgspec.json.encode(result), response.is_success


def _encode_error(custom_id: str, number: int, code: str, message: str) -> bytes:
    return msgspec.json.encode(
        {
            "id": _result_id(custom_id, number),
            "custom_id": custom_id,
            "response": None,
            "error": {"code": code, "message": message},
        }
    )


def _result_id(custom_id: str, number: int) -> str:
    return "batch_req_" + hashlib.sha256(f"{number} {custom_id}".encode()).hexdigest()[:24]


async def _answer(files: BatchFiles, url: str, api_key: str | None, concurrency: int) -> int:
    """Answer the lines with the server at `url`, and return how many failed."""
    import httpx2

    started_at = time.monotonic()
    with open_client(url, api_key) as client, fail_without_server(url):
        default_model = fetch_default_model(client)
        base_url, headers = client.base_url, client.headers
    transport = None
    if url.startswith("unix:"):
        transport = httpx2.AsyncHTTPTransport(uds=url.removeprefix("unix:"))
    timeout = httpx2.Timeout(REQUEST_TIMEOUT_S, pool=None)
    limits = httpx2.Limits(max_connections=concurrency)
    async with httpx2.AsyncClient(
        base_url=base_url,
        headers=headers,
        timeout=timeout,
        limits=limits,
        transport=transport,
        trust_env=False,
    ) as sender:
        batch_run = _BatchRun(sender, files, concurrency, default_model)
        with ProgressBar("Requests", files.input_bytes) as progress:
            progress.update(advance=files.done_bytes)
            await batch_run.answer(progress)
    typer.echo(f"Finished in {time.monotonic() - started_at:.1f} s.", err=True)
    return batch_run.num_failed


@contextlib.contextmanager
def _start_replica(model: str | None, options: Mapping[str, Any]) -> Iterator[str]:
    """Load a model in a process that ends with this one, and yield the URL at which it answers."""
    folder = create_socket_folder("argosy-batch-", len(SOCKET_NAME))
    socket = folder / SOCKET_NAME
    replica = {**options, "uds": str(socket), "drain_deadline": 0}
    if model is not None:
        replica["model"] = model
    command = [
        sys.executable,
        "-m",
        "argosy.cli",
        "replica",
        "--options",
        msgspec.json.encode(replica).decode(),
    ]
    try:
        kill = partial(kill_with_parent, os.getpid())
        with subprocess.Popen(command, preexec_fn=kill) as process:  # noqa: PLW1509, S603 - our own program
            try:
                _wait_until_ready(process, f"unix:{socket}")
                yield f"unix:{socket}"
            finally:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Return once the model is loaded. If the process exits before, it has printed why, and the command ends."""
    import httpx2

    with open_client(url, None) as client:
        while process.poll() is None:
            with contextlib.suppress(httpx2.HTTPError):
                if client.get("/ready").status_code == 200:
                    return
            time.sleep(READY_INTERVAL_S)
    raise typer.Exit(EXIT_USAGE)
