"""`argosy rollout`: what it shows, stores and waits for, with a real store and with or without a controller."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.migrated_store import open_migrated_store
from tests.support.stored_rollout import DECLARATION, NEW, OLD, POOL, StoredRollout
from typer.main import get_command
from typer.testing import CliRunner, Result

from argosy.cli.app import app
from argosy.deployment import append_command, read_fleet_status
from argosy.policy.rollout import (
    CommandKind,
    RolloutCommand,
    RolloutState,
    VersionStatus,
)
from argosy.store import DECISION

runner = CliRunner()
DECISIONS = {
    "rollout pause": ["--no-wait"],
    "rollout resume": ["--no-wait", "--force"],
    "rollout promote": ["--no-wait", "--force"],
    "rollout abort": ["--no-wait"],
    "scale": [POOL, "1"],
    "rollback": ["1", "--yes"],
    "apply": ["one.yaml", "--yes"],
    "up": ["two.yaml", "--no-wait"],
    "down": ["--no-wait"],
}
"""Arguments of each command with a reason, in an order in which all are possible."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoredRollout]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARGOSY_STORE", f"sqlite:///{tmp_path}/fleet.db")
    monkeypatch.setattr("argosy.cli.rollout.POLL_INTERVAL_S", 0.01)
    with closing(open_migrated_store(f"sqlite:///{tmp_path}/fleet.db")) as store:
        yield StoredRollout(store.fleets)


def run(*arguments: str) -> Result:
    result = runner.invoke(app, ["rollout", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


def test_status_shows_state_measurements_and_what_it_waits_for(world: StoredRollout) -> None:
    world.measure()
    world.decide_once()
    output = run("status").stdout
    for text in (
        "Pool chat: step: ",
        "step 1 of 4: shadow 10%",
        f"canary from {OLD[:12]} to {NEW[:12]}",
        f"copies of 10% to {NEW[:12]}",
        f"version {NEW[:12]}: 1 of 1 replicas are ready",
        "the step lasts",
        "ttft",
        "gate: inconclusive, not enough evidence yet after 5 requests of the new version",
        "0 of 50 (0.0%)",
    ):
        assert text in output, output
    assert OLD not in output
    assert "evidence (e-values)" not in output
    assert "evidence (e-values) of a worse version 1 of 100" in run("status", "-v").stdout
    report = json.loads(run("status", POOL, "--json").stdout)[0]
    assert report["rollouts"]["current"]["state"] == "step"
    assert report["status"]["result"] == "inconclusive"
    assert run("status", "other").exit_code == 1
    fleet = runner.invoke(app, ["status"]).stdout
    assert "rollout: step: the pinned prompts have passed" in fleet


def test_commands_wait_until_the_controller_follows_or_refuses(world: StoredRollout) -> None:
    with world.controller():
        paused = run("pause", "--reason", "lunch")
    assert paused.exit_code == 0, paused.output
    assert "paused: lunch" in paused.stderr
    with world.controller():
        again = run("pause", POOL)
    assert again.exit_code == 1
    assert "pause is refused: the rollout is paused already" in again.stderr
    with world.controller():
        resumed = run("resume", "--json")
    assert json.loads(resumed.stdout)["rollouts"]["current"]["state"] == "step"
    with world.controller():
        promoted = run("promote")
    assert "repeat it with force and a reason" in promoted.stderr
    assert run("promote", "--force").exit_code == 2
    with world.controller():
        forced = run("promote", "--force", "--reason", "tested elsewhere")
    assert forced.exit_code == 0, forced.output
    assert "step 2 of 4: 5%" in forced.stderr


def test_report_without_a_command_has_its_result(
    world: StoredRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = RolloutCommand(kind=CommandKind.PAUSE, by="test", reason="lunch")
    append_command(world.store, "demo", POOL, pause)

    def decide_after(read: Callable[[str], object]) -> Callable[[str], object]:
        def read_and_decide(fleet: str) -> object:
            result = read(fleet)
            patch.undo()
            world.decide_once()
            return result

        return read_and_decide

    with monkeypatch.context() as patch:
        for name in ("read_records", "read_documents"):
            patch.setattr(world.store, name, decide_after(getattr(world.store, name)))
        first = world.report
    assert first.commands or first.summary.startswith("paused: lunch")
    assert world.report.summary.startswith("paused: lunch")


def test_abort_needs_no_controller(world: StoredRollout) -> None:
    world.release()
    paused = run("pause", "--timeout", "0")
    assert paused.exit_code == 1
    assert "remains stored" in paused.stderr
    aborted = run("abort", "--reason", "wrong answers")
    assert aborted.exit_code == 0, aborted.output
    assert f"sends all users to version {OLD[:12]}" in aborted.stderr
    assert "No controller leads the fleet" in aborted.stderr
    route = world.report.route
    assert route is not None
    assert route.rollback is not None
    assert (route.rollback.reason, route.variants, route.shadow) == ("wrong answers", (), None)
    assert [command.kind for command in world.report.commands] == ["pause", "abort"]
    assert "waits for a controller: abort" in run("status").stdout

    lease = world.store.acquire_lease("controller/2/2", world.store.read_lease("demo"))
    assert lease is not None
    world.lease = lease
    for _ in range(4):
        world.decide_once()
    current = world.report.rollouts.current
    assert current is not None
    assert (current.state, current.cause) == (RolloutState.CLEANING, "command")
    assert not world.report.commands
    late = run("abort")
    assert late.exit_code == 1
    assert "abort is refused: the rollout is cleaning" in late.stderr


def test_version_that_was_rolled_back_can_be_resumed(world: StoredRollout) -> None:
    world.measure()
    abort = RolloutCommand(kind=CommandKind.ABORT, by="test", reason="slow")
    append_command(world.store, "demo", POOL, abort)
    for _ in range(4):
        world.decide_once()
        world.candidate = VersionStatus()
    assert world.state == "aborted"
    assert "no rollout of the pool chat is running" in run("pause", POOL).stderr
    shown = run("status").stdout
    assert f"rolled back: version {NEW[:12]} (slow)" in shown
    assert "0 of 50 (0.0%)" in shown
    (pool,) = read_fleet_status(world.store, "demo").pools
    assert (pool.ready, pool.is_as_declared, pool.rollout and pool.rollout.can_retry) == (
        1,
        False,
        True,
    )
    with world.controller():
        resumed = run("resume", "--reason", "the cause was elsewhere")
    assert resumed.exit_code == 0, resumed.output
    assert world.state == "starting"


def list_commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - of typer's click
    """Yield all commands of a tree, by their names on the command line."""
    if not hasattr(command, "commands"):
        yield name, command
    for word, each in getattr(command, "commands", {}).items():
        yield from list_commands(each, f"{name} {word}".strip())


def test_every_command_is_recorded_with_author_force_and_reason(
    world: StoredRollout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = dict(list_commands(get_command(app)))
    with_reason = {
        name
        for name, command in commands.items()
        if any(each.name == "reason" for each in command.params)
        and not name.startswith(
            ("alerts ", "flags ", "incidents ", "replicas ")
        )  # send it to a gateway
    }
    assert with_reason == set(DECISIONS)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("argosy.controller_keeper.start_keeper", lambda *_: None)
    for number, file in enumerate(("one.yaml", "two.yaml"), 1):
        text = DECLARATION.decode().replace('"replicas": 2', f'"replicas": {number}')
        Path(file).write_text(text)
    author = f"{getpass.getuser()}@{socket.gethostname()}"
    for number, (name, arguments) in enumerate(DECISIONS.items()):
        reason = f"reason {number}"
        files = [] if name in {"apply", "up"} else ["--fleet", "demo"]
        result = runner.invoke(app, [*name.split(), *arguments, *files, "--reason", reason])
        assert result.exit_code == 0, (name, result.output)
        event = world.store.list_events("demo", kinds=[DECISION], limit=1)[0]
        forced = " by force" if "--force" in arguments else ""
        assert event.reason.endswith(f"{forced} by {author}: {reason}"), name
        shown = runner.invoke(app, ["audit", "--json"]).stdout
        entry = json.loads(shown)[0]
        assert (entry["actor"], entry["details"]["reason"]) == (author, reason)
        assert event.reason.startswith(f"{entry['action']}{forced} by ")
