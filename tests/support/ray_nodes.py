"""Ray cluster of several nodes on this machine, in a network namespace, since Ray listens on all addresses.

Run as a process, this module starts the nodes, and removes those whose number it reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNET = 0x40000000
NODE_MEMORY_BYTES = 8 << 30
OBJECT_STORE_BYTES = 80 << 20
LABELS = {"disk": "nvme"}


@contextlib.contextmanager
def network_namespace() -> Iterator[None]:
    """Move this thread, and what it starts, to a network that has a loopback interface only.

    Raises:
        PermissionError: This process may not create one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as original:
        if libc.unshare(CLONE_NEWNET):
            raise PermissionError(ctypes.get_errno(), "a network namespace cannot be created")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            libc.setns(original.fileno(), CLONE_NEWNET)


class RayNodes:
    """A cluster of three nodes in the zones a (the head), b and c. The last two have a GPU each, by their own account.

    Args:
        folder: Folder for Ray's files.
    """

    def __init__(self, folder: Path) -> None:
        environment = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # this machine's other processes do not count
            "RAY_TMPDIR": str(folder),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_nodes"],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._read_line()
        """Address of the cluster."""

    def remove_node(self, number: int) -> None:
        """End all processes of a node at once. Returns when they have ended."""
        assert self._process.stdin is not None
        print(f"remove {number}", file=self._process.stdin, flush=True)
        self._read_line()

    def add_node(self, number: int) -> None:
        """Add a node like the one that was removed."""
        assert self._process.stdin is not None
        print(f"add {number}", file=self._process.stdin, flush=True)
        self._read_line()

    def close(self) -> None:
        """End the cluster."""
        self._process.communicate()

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the Ray cluster could not be started"
        return str(json.loads(line))


def main() -> None:
    """Start the nodes, and handle commands until standard input is closed."""
    from ray.cluster_utils import Cluster

    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(result: object) -> None:
        print(json.dumps(result), file=results, flush=True)

    cluster = Cluster()

    def add_node(number: int) -> object:
        return cluster.add_node(
            num_cpus=4,
            num_gpus=min(number, 1),
            memory=NODE_MEMORY_BYTES,
            object_store_memory=OBJECT_STORE_BYTES,
            labels={**LABELS, "ray.io/availability-zone": "abc"[number]},
            resources={"board": 1.0} if number == 1 else {},
            node_ip_address="127.0.0.1",
            include_dashboard=False,
            wait=False,
        )

    nodes = [add_node(number) for number in range(3)]
    cluster.wait_for_nodes()
    report(cluster.address)
    for line in sys.stdin:
        command, number = line.split()
        if command == "remove":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        else:
            nodes[int(number)] = add_node(int(number))
        report(number)
    cluster.shutdown()


if __name__ == "__main__":
    main()
