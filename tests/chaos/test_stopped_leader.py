"""Two controllers with real processes on PostgreSQL. The leader is stopped at random moments, and woken later."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from tests.support import controlled_fleet
from tests.support.controlled_fleet import FLEET, REPLICA
from tests.support.waiting import until

from argosy.deployment import FleetConfig, stop_everything
from argosy.fleet.launchers import LocalProcessLauncher, StaleEpochError
from argosy.store import FleetLease


@dataclass
class Fleet(controlled_fleet.Fleet):
    """A fleet of scripted replicas, and its two controllers as processes."""

    lease_s: float = 0.0
    controllers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    takeover_s: list[float] = field(default_factory=list)

    @property
    def lease(self) -> FleetLease:
        return self.store.fleets.read_lease(FLEET)

    @property
    def leader(self) -> subprocess.Popen[bytes]:
        """The controller that leads."""
        pid = int(self.lease.holder.split("/")[1])
        return next(each for each in self.controllers if each.pid == pid)

    def declare(self, replicas: int, version: int) -> FleetConfig:
        return controlled_fleet.declare(
            f"exclusive={self.folder}/{{name}}.lock",
            "print=1",
            lease_s=self.lease_s,
            replicas=replicas,
            environment={"VERSION": str(version)},
        )

    def start_process(self) -> None:
        command = [sys.executable, "-P", "-m", "argosy.cli", "controller", "--fleet", FLEET]
        with (self.folder / f"controller-{len(self.controllers)}.log").open("wb") as log:
            self.controllers.append(
                subprocess.Popen(
                    [*command, "--store", self.url, "--until-down"],
                    env=os.environ | {"XDG_STATE_HOME": str(self.folder / "state")},
                    stdout=log,
                    stderr=log,
                )
            )

    async def wait_until_as_declared(self) -> None:
        def is_as_declared() -> bool:
            assert all(each.poll() is None for each in self.controllers), "a controller has ended"
            return self.status.is_as_declared

        await until(is_as_declared)

    async def stop_leader(self) -> tuple[subprocess.Popen[bytes], int]:
        """Stop the leader, and wait until the other controller leads. Returns the stopped one and its epoch."""
        stopped, epoch = self.leader, self.lease.epoch
        stopped.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        await until(lambda: self.lease.epoch > epoch)
        self.takeover_s.append(time.monotonic() - stopped_at)
        return stopped, epoch

    def count_processes(self) -> dict[str, int]:
        """Return the number of processes of each replica, by name."""
        counts: dict[str, int] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                command = process.cmdline()
                if str(REPLICA) in command and str(self.folder) in command[-2]:
                    name = Path(command[-2]).stem
                    counts[name] = counts.get(name, 0) + 1
        return counts


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path, postgres_url: str) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, postgres_url, lease_s=request.param)
    yield fleet
    for controller in fleet.controllers:
        controller.kill()
        controller.wait()
    fleet.store.close()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(tmp_path) in process.environ().get("ARGOSY_REPLICA", ""):
                process.kill()


@pytest.mark.parametrize(
    ("fleet", "rounds"),
    [
        (2.0, 1),
        pytest.param(5.0, 20, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1200)]),
    ],
    indirect=["fleet"],
)
async def test_no_action_is_doubled(fleet: Fleet, rounds: int) -> None:
    draw = random.Random(rounds)
    fleet.apply(fleet.declare(3, 0))
    for _ in range(2):
        fleet.start_process()
    await fleet.wait_until_as_declared()
    launcher = LocalProcessLauncher(fleet.folder / "state/argosy/fleets" / FLEET / "replicas")
    for version in range(1, rounds + 1):
        fleet.apply(fleet.declare(draw.randint(1, 4), version))
        await asyncio.sleep(draw.uniform(0.0, 1.5))  # into starts, drains and stops
        stopped, epoch = await fleet.stop_leader()
        if draw.random() < 0.5:
            fleet.apply(fleet.declare(draw.randint(1, 4), version))
        await asyncio.sleep(draw.uniform(0.0, 1.0))
        stopped.send_signal(signal.SIGCONT)
        await fleet.wait_until_as_declared()
        with pytest.raises(StaleEpochError):
            await launcher.drain("", epoch)
        status = fleet.status
        await until(lambda: {*fleet.count_processes().values()} == {1}, interval_s=0.1)
        assert fleet.count_processes().keys() == {replica.name for replica in status.replicas}
    await launcher.close()

    fleet.apply(stop_everything(fleet.declare(1, 0)))
    await until(lambda: 0 in {each.poll() for each in fleet.controllers})
    assert not fleet.count_processes()
    assert not [*fleet.folder.glob("*.doubled")], "two processes had the same name at the same time"
    epochs = [event.epoch for event in fleet.store.fleets.list_events(FLEET, limit=100_000)]
    assert epochs == sorted(epochs), "a deposed leader recorded an action"
    assert fleet.lease.epoch > rounds
    print(f"took over after {', '.join(f'{each:.1f}' for each in fleet.takeover_s)} s")  # noqa: T201 - the figure
