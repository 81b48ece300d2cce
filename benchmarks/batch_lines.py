"""Measure the memory and the speed of many lines of batches, without a model that computes.

    python -m benchmarks.batch_lines run [--lines 500000]
    python -m benchmarks.batch_lines gateway [--lines 500000]

The first one sends the lines by `argosy batch run` to a server that answers at once. Then it runs the command again,
which finds nothing to do.

The second one uploads files of at most 50,000 lines to a gateway, which validates them, and cancels the
batches. Their lines then fill error files. No replica runs meanwhile. Both print a JSON line with seconds and the peak
of the process's resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.store import StoreConfig

CHAT = "/v1/chat/completions"
MODEL = "stand-in"
FILE_LINES = 50_000
ANSWER = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 20}}]}


def write_lines(path: Path, start: int, count: int) -> None:
    """Write lines with ids from `start` on."""
    with path.open("w") as file:
        for number in range(start, start + count):
            messages = [{"role": "user", "content": f"Label text {number}. " + "word " * 20}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 20}
            line = {"custom_id": f"q{number}", "method": "POST", "url": CHAT, "body": body}
            file.write(json.dumps(line) + "\n")


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection: the list of models, and otherwise a chat."""
    listed, body = json.dumps({"data": [{"id": MODEL}]}).encode(), json.dumps(ANSWER).encode()
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            break
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if length is not None:
            await reader.readexactly(int(length[1]))
        content = body if head.startswith(b"POST") else listed
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(content), content))
    writer.close()


async def run_command(*arguments: str) -> dict[str, Any]:
    """Run `argosy batch run`, and return its seconds and the peak of its memory."""
    began_at = time.monotonic()
    command = [sys.executable, "-m", "argosy.cli", "batch", "run", *arguments]
    process = subprocess.Popen(command)  # noqa: ASYNC220 - its start is short
    _, status, usage = await asyncio.to_thread(os.wait4, process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise SystemExit(f"argosy batch run ended with {process.returncode}")
    return {"seconds": round(time.monotonic() - began_at, 1), "peak_mb": usage.ru_maxrss // 1000}


async def measure_run(folder: Path, lines: int) -> dict[str, Any]:
    """Answer the lines of a file, and then none of them."""
    write_lines(folder / "in.jsonl", 0, lines)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    files = ("-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--url", url)
    first, second = await run_command(*files), await run_command(*files)
    server.close()
    return {"lines": lines, **first} | {f"again_{name}": value for name, value in second.items()}


def read_memory_mb(pid: int, field: str) -> int:
    """Return a field of the memory of a process."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) // 1000 if found else 0


@contextmanager
def timing(row: dict[str, Any], name: str) -> Iterator[None]:
    """Add the seconds of a block to a row."""
    began_at = time.monotonic()
    yield
    row[name] = round(time.monotonic() - began_at, 1)


async def measure_gateway(folder: Path, lines: int) -> dict[str, Any]:
    """Upload, validate, hold and cancel lines in a gateway."""
    config = GatewayConfig(
        port=0,
        models=[ModelConfig(name=MODEL, replicas=[ReplicaConfig(url="http://127.0.0.1:9")])],
        store=StoreConfig(url=f"sqlite:///{folder}/store.db", max_stored_bytes_per_project=1 << 40),
    )
    (folder / "gateway.yaml").write_bytes(msgspec.json.encode(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "argosy.cli", "gateway", "--config", str(folder / "gateway.yaml")),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"XDG_STATE_HOME": str(folder)},
    )
    assert process.stderr is not None  # noqa: S101 - it is a pipe
    try:
        while not (found := re.search(r"ready at (http\S+)/v1", await read_line(process.stderr))):
            pass
        draining = asyncio.create_task(process.stderr.read())
        async with httpx2.AsyncClient(base_url=found[1], timeout=600.0) as client:
            row: dict[str, Any] = {"lines": lines, "idle_mb": read_memory_mb(process.pid, "VmRSS")}
            batches = []
            with timing(row, "validate_s"):
                for start in range(0, lines, FILE_LINES):
                    path = folder / "in.jsonl"
                    write_lines(path, start, min(FILE_LINES, lines - start))
                    with path.open("rb") as file:
                        form: dict[str, Any] = {"file": file, "purpose": (None, "batch")}
                        stored = (await client.post("/v1/files", files=form)).raise_for_status()
                    body = {"input_file_id": stored.json()["id"], "endpoint": CHAT}
                    body |= {"completion_window": "24h"}
                    created = (await client.post("/v1/batches", json=body)).raise_for_status()
                    batches.append(created.json()["id"])
                await wait_for(client, batches, "in_progress")
            before_s = read_processor_s(process.pid)
            await asyncio.sleep(10.0)
            row["cpu_with_waiting_lines"] = round(
                (read_processor_s(process.pid) - before_s) / 10, 3
            )
            with timing(row, "cancel_s"):
                for batch in batches:
                    (await client.post(f"/v1/batches/{batch}/cancel")).raise_for_status()
                await wait_for(client, batches, "cancelled")
            row["peak_mb"] = read_memory_mb(process.pid, "VmHWM")
        draining.cancel()
    finally:
        process.kill()
        await process.wait()
    return row


async def read_line(stream: asyncio.StreamReader) -> str:
    """Return the next line of a process's messages."""
    line = await stream.readline()
    if not line:
        raise SystemExit("The gateway ended before it was ready.")
    return line.decode()


def read_processor_s(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def wait_for(client: httpx2.AsyncClient, batches: list[str], status: str) -> None:
    """Wait until all batches have a status."""
    for batch in batches:
        while True:
            found = (await client.get(f"/v1/batches/{batch}")).raise_for_status().json()
            if found["status"] == status:
                break
            if found["status"] == "failed":
                raise SystemExit(json.dumps(found["errors"]))
            await asyncio.sleep(0.2)


def main() -> None:
    """Parse the options, measure, and print a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "gateway"])
    parser.add_argument("--lines", type=int, default=500_000)
    options = parser.parse_args()
    measure = measure_run if options.what == "run" else measure_gateway
    with tempfile.TemporaryDirectory(prefix="argosy-lines-") as folder:
        row = asyncio.run(measure(Path(folder), options.lines))
    print(json.dumps({"what": options.what} | row))


if __name__ == "__main__":
    main()
