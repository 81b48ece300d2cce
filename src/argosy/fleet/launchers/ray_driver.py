"""Driver process of a `RayLauncher`: connects to a Ray cluster, and forwards requests to the registry of a fleet.

Ray's library changes signal handlers and ends its process when it loses the cluster for long. A controller, which may
run replicas elsewhere too, must outlive that. This process has a line of JSON on standard input for each request, and
writes a line to standard output for each response. It ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import BinaryIO

import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from argosy.fleet.launchers.ray_messages import RayRequest, RayResponse
from argosy.fleet.launchers.ray_registry import ReplicaRegistry

REGISTRY_NAME = "argosy-registry"
HEAD_RESOURCE = "node:__internal_head__"


def main(address: str, namespace: str) -> None:
    """Serve requests until standard input is closed.

    The address is `auto` for that of `RAY_ADDRESS` or of this machine's node.
    """
    responses = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever else is printed is no response
    try:
        ray.init(address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        _write(responses, msgspec.json.encode(RayResponse(id=0, error=str(error))))
        return
    _write(responses, msgspec.json.encode(RayResponse(id=0)))
    asyncio.run(_serve(namespace, responses))


async def _serve(namespace: str, responses: BinaryIO) -> None:
    reader = asyncio.StreamReader(limit=sys.maxsize)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    registry: ActorHandle | None = None
    tasks: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        registry = registry or await asyncio.to_thread(_open_registry, namespace)
        task = asyncio.create_task(_forward(registry, line, responses))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    os._exit(0)  # pending requests have no reader any more


def _open_registry(namespace: str) -> ActorHandle:
    """Return the registry of the fleet. The first driver creates it, if possible on the head node."""
    heads = [node["NodeID"] for node in ray.nodes() if HEAD_RESOURCE in node["Resources"]]
    on_head = NodeAffinitySchedulingStrategy(heads[0], soft=True) if heads else "DEFAULT"
    return (
        ray.remote(ReplicaRegistry)
        .options(
            name=REGISTRY_NAME,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            scheduling_strategy=on_head,
        )
        .remote(namespace)
    )


async def _forward(registry: ActorHandle, line: bytes, responses: BinaryIO) -> None:
    try:
        response: bytes = await registry.call.remote(line)
    except ActorUnavailableError:
        error = "the registry of the fleet on the Ray cluster is being restarted"
        response = _failure(line, error)
    except RayTaskError as error:
        response = _failure(line, f"the registry of the fleet failed: {error.cause!r}")
    except RayError as error:  # it ended for good; the next driver creates another one
        _write(responses, _failure(line, str(error).strip().partition("\n")[0]))
        os._exit(1)
    _write(responses, response)


def _failure(line: bytes, error: str) -> bytes:
    number = msgspec.json.decode(line, type=RayRequest).id
    return msgspec.json.encode(RayResponse(id=number, error=error))


def _write(responses: BinaryIO, response: bytes) -> None:
    data = response + b"\n"
    while data:
        data = data[responses.write(data) :]


if __name__ == "__main__":
    main(*sys.argv[1:])
