"""Count the API requests of a controller on Kubernetes, and the time from a fault to its sentence and to recovery.

    python -m benchmarks.kubernetes_requests [--seconds 60]

The cluster is the double of the tests, whose replicas are small programs, so only the numbers of requests are those of
a real one. Prints a JSON line for each situation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.controlled_fleet import Fleet, declare
from tests.support.kubernetes_api import ApiError, KubernetesApiServer
from tests.support.kubernetes_cluster import KubernetesCluster
from tests.support.waiting import until

from argosy.deployment import set_replicas, stop_everything
from benchmarks.processes import exit_on_sigterm

REFUSALS = {
    "removal": ("DELETE deployments", 'User "u" cannot delete resource "deployments"'),
    "start": ("POST deployments", "exceeded quota: q, requested: count/deployments.apps=1"),
    "list": ("LIST deployments", 'User "u" cannot list resource "deployments"'),
}


class Bench:
    """A fleet on the double, with its controller."""

    def __init__(self, api: KubernetesApiServer, fleet: Fleet) -> None:
        self._api = api
        self._fleet = fleet

    async def measure(self, situation: str, work: Callable[[], Awaitable[object]]) -> None:
        """Print the requests during some work."""
        self._api.requests.clear()
        started_at, events = time.monotonic(), len(self._fleet.events("replica_remove"))
        found = await work()
        row: dict[str, Any] = {
            "situation": situation,
            "seconds": round(time.monotonic() - started_at, 1),
            "requests": self._api.requests.total(),
            "events": len(self._fleet.events("replica_remove")) - events,
            "by_kind": dict(self._api.requests.most_common()),
        }
        print(json.dumps(row | (found if isinstance(found, dict) else {})), flush=True)

    async def refuse(self, name: str, replicas: int, seconds: float) -> dict[str, float]:
        """Refuse a kind of requests while the fleet shall change. Return how long its sentences came and went."""
        request, message = REFUSALS[name]
        self._api.refused[request] = ApiError(403, "Forbidden", message)
        if name == "list":
            self._api.compact()
            self._api.expires_watches = True
            self._api.end_watches()
        config = self._fleet.declaration()
        self._fleet.apply(set_replicas(config, "chat", replicas))
        began_at = time.monotonic()
        await until(lambda: message in str(self._fleet.status.problems) + self._reasons())
        named_s = time.monotonic() - began_at
        await asyncio.sleep(seconds - named_s)
        self._api.refused.clear()
        self._api.expires_watches = False
        ended_at = time.monotonic()
        await until(lambda: self._fleet.status.is_as_declared)
        return {
            "named_s": round(named_s, 1),
            "recovered_s": round(time.monotonic() - ended_at, 1),
        }

    def _reasons(self) -> str:
        return " ".join(replica.reason for replica in self._fleet.status.replicas)


async def run(seconds: float, folder: Path) -> None:
    """Measure all situations."""
    os.environ["KUBECONFIG"] = str(folder / "kubeconfig")
    api, fleet = KubernetesApiServer(), Fleet(folder)
    options: dict[str, Any] = {"launcher": "kubernetes", "image": "replica:1"}
    config = declare("print=1", address="{host}:{port}", **options)
    async with api.serve(folder / "kubeconfig"), KubernetesCluster(api, folder).run():
        bench = Bench(api, fleet)
        fleet.apply(config)
        controller = fleet.start_controller("one")
        try:

            async def scale(replicas: int) -> None:
                fleet.apply(set_replicas(config, "chat", replicas))
                await until(lambda: fleet.status.is_as_declared)

            async def replace() -> None:
                fleet.apply(declare("print=2", address="{host}:{port}", **options))
                await until(lambda: fleet.status.is_as_declared)

            await until(lambda: fleet.status.is_as_declared)
            await bench.measure("quiet", lambda: asyncio.sleep(seconds))
            await bench.measure("scale 2 to 6", lambda: scale(6))
            await bench.measure("scale 6 to 2", lambda: scale(2))
            await bench.measure("rolling update of 2", replace)
            for name, replicas in (("removal", 1), ("start", 2), ("list", 1)):
                refuse = partial(bench.refuse, name, replicas, seconds)
                await bench.measure(f"refused {name}", refuse)
            fleet.apply(stop_everything(config))
            await controller
        finally:
            await fleet.close()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of a situation")
    options = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(options.seconds, Path(folder)))


if __name__ == "__main__":
    main()
