"""Commands for a declared fleet without a controller: refusals with one clear error that change nothing, and logs."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.support.full_disk import full_disk
from tests.support.kubernetes_api import build_kubeconfig
from tests.support.waiting import wait_for
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.deployment import (
    dump_fleet,
    load_fleet,
    pool_digests,
    read_fleet_status,
    set_replicas,
)
from argosy.extras import install_command
from argosy.fleet.control import process_holder
from argosy.store import ReplicaLogRun, Store, open_store
from argosy.version import VERSION

DECLARATION = """\
fleet: demo
port: {port}
models:
  - {{name: chat, source: argosy-mini}}
pools:
  - {{name: chat, model: chat, launcher: {launcher}}}
"""

runner = CliRunner()


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for the state of fleets and the default store, which does not exist yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state"


def declare(launcher: str = "local", port: int = 0) -> None:
    Path("fleet.yaml").write_text(DECLARATION.format(launcher=launcher, port=port))


def refuse(command: str, *arguments: str) -> str:
    """Run a command that is refused, and return its error."""
    result = runner.invoke(app, [command, *arguments])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("argosy: ")
    return result.stderr


def list_fleets(url: str) -> list[str]:
    with closing(open_store(url)) as store:
        store.migrate()
        return store.fleets.list_fleets()


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (Path.touch, "`models`"),
        (os.mkfifo, "no program has written to this pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "larger than 4 MiB"),
        (Path.mkdir, "Is a directory"),
    ],
    ids=["empty", "pipe", "device", "folder"],
)
def test_file_that_is_no_declaration(
    write: Callable[[Path], object], error: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.settings.yaml_nodes.PIPE_TIMEOUT_S", 0.01)
    write(Path("fleet.yaml"))
    message = refuse("up")
    assert "fleet.yaml" in message
    assert error in message
    assert not state.exists()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("postgresql://user:hidden@127.0.0.1:1/x", "Connection refused. Check that it is running"),
        ("sqlite:////proc/argosy.db", "Give a path that this user can write to"),
        ("sqlite:///fleet.yaml", "file is not a database"),
    ],
)
def test_unusable_store(url: str, error: str, state: Path) -> None:
    declare()
    message = refuse("up", "--store", url)
    assert error in message
    assert "hidden" not in message
    assert not state.exists()


@pytest.mark.parametrize("store_exists", [False, True])
def test_full_disk(store_exists: bool, state: Path) -> None:
    declare()
    url = f"sqlite:///{Path('argosy.db').absolute()}"
    if store_exists:
        list_fleets(url)
    with full_disk():
        assert "disk I/O error" in refuse("up", "--store", url)
    assert list_fleets(url) == []
    assert not (state / "argosy/fleets/demo").exists()


@pytest.mark.parametrize("command", ["up", "plan", "apply"])
def test_cluster_that_cannot_be_used(
    command: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "kubeconfig")
    declare(launcher="kubernetes, image: none")
    assert "no Kubernetes cluster is configured" in refuse(command)
    Path("kubeconfig").write_text(build_kubeconfig("127.0.0.1", 1))
    assert "the Kubernetes API at http://127.0.0.1:1 cannot be reached" in refuse(command)
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio.client.api_client", None)
    assert f"install it with: {install_command('kubernetes')}" in refuse(command)
    assert not (state / "argosy/fleets/demo").exists()
    assert list_fleets(f"sqlite:///{state}/argosy/argosy.db") == []


def test_port_in_use(state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        declare(port=port)
        message = refuse("up")
    assert f"127.0.0.1:{port} (Address already in use)" in message
    assert "change `port`" in message
    assert not (state / "argosy/fleets/demo").exists()
    assert list_fleets(f"sqlite:///{state}/argosy/argosy.db") == []


def test_folder_that_cannot_be_created(state: Path) -> None:
    declare()
    url = f"sqlite:///{Path('argosy.db').absolute()}"
    state.touch()
    assert "set XDG_STATE_HOME" in refuse("up", "--store", url)
    assert list_fleets(url) == []


def test_name_of_another_fleet() -> None:
    declare()
    message = refuse("status", "-f", "fleet.yaml", "--fleet", "other")
    assert "is of the fleet 'demo', not 'other'" in message


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Store of the commands, without a controller."""
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    monkeypatch.setenv("ARGOSY_STORE", url)
    with closing(open_store(url)) as store:
        store.migrate()
        yield store


def test_wait_needs_a_controller_that_lives(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of a controller that was killed say that all is ready, although it may be gone."""
    Path("fleet.yaml").write_text(
        "{fleet: demo, gateways: 0, models: [{name: chat, replicas: [{url: 'http://127.0.0.1:1'}]}]}"
    )
    assert runner.invoke(app, ["apply"]).exit_code == 0
    result = runner.invoke(app, ["apply", "--wait", "--timeout", "0"])
    assert result.exit_code == 1
    assert "no controller has carried out the revision yet" in result.stderr
    interrupt_sleep(monkeypatch)
    result = runner.invoke(app, ["apply", "--wait"])
    assert result.exit_code == 130
    assert "The controller goes on with the change" in result.stderr


def test_version_that_differs_is_shown_and_left_to_whoever_runs_the_controller(
    store: Store,
) -> None:
    declare()
    assert runner.invoke(app, ["apply"]).exit_code == 0
    lease = store.fleets.acquire_lease(process_holder(), store.fleets.read_lease("demo"))
    assert lease is not None
    replica = {
        "name": "chat-1-0",
        "pool": "chat",
        "generation": 1,
        "ordinal": 0,
        "launcher": "local",
        "phase": "ready",
        "version": "0.0.1",
    }
    observed = {"epoch": lease.epoch, "revision": 1, "version": "0.0.2"}
    records = {"replica/chat-1-0": replica, "observed": observed}
    encoded = {name: msgspec.json.encode(each) for name, each in records.items()}
    store.fleets.save_records(lease, dict(encoded))
    assert "1 replica replaced" in runner.invoke(app, ["plan"]).stdout
    assert "Nothing changes" in runner.invoke(app, ["apply"]).stderr, "the controller comes first"
    assert f"restart it with version {VERSION}" in " ".join(refuse("up").split())
    for digit in "12":
        store.adapters.add_version("sql", "chat", f"sha256:{digit * 64}", actor="test")
    shown = runner.invoke(app, ["status"]).stdout
    assert "1 replica runs another version (0.0.1) than the controller (0.0.2)" in shown
    assert "adapter sql of chat: loading, and measuring the version that answers" in shown
    observed["version"] = VERSION
    store.fleets.save_records(lease, {"observed": msgspec.json.encode(observed)})
    assert runner.invoke(app, ["apply", "--yes"]).exit_code == 0
    (revision,) = store.fleets.list_revisions("demo", 1)
    assert (revision.reason, revision.generations["chat"].generation) == (
        f"upgrade to version {VERSION}",
        2,
    )


def test_file_of_a_source_does_not_undo_what_people_decided(store: Store) -> None:
    """A job of a cluster may run again at any time, for example because its node is drained."""
    declare()
    manifest = ["apply", "--yes", "--source", "manifest"]
    assert runner.invoke(app, manifest).exit_code == 0
    for decision in (["scale", "chat", "2"], ["rollback", "1"], ["down", "--no-wait"]):
        assert runner.invoke(app, decision).exit_code == 0
        decided = store.fleets.latest_revision("demo")
        again = runner.invoke(app, manifest)
        assert again.exit_code == 0
        assert "revision 1 was the last one of the source 'manifest'" in again.stderr
        assert store.fleets.latest_revision("demo") == decided
    declare(port=8123)
    assert runner.invoke(app, manifest).exit_code == 0
    assert [each.author for each in store.fleets.list_revisions("demo", 1)] == ["manifest"]


def interrupt_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C when a command waits."""

    def interrupt(_interval_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("argosy.cli.fleet_progress.time.sleep", interrupt)


def test_wait_ends_when_nothing_can_start(store: Store) -> None:
    declare()
    assert runner.invoke(app, ["apply"]).exit_code == 0
    lease = store.fleets.acquire_lease("other", store.fleets.read_lease("demo"))
    assert lease is not None

    def wait(*phases: str) -> str:
        """Wait for replicas in these phases since the command began, and return the error."""
        since = time.time()
        records = {
            f"replica/chat-1-{number}": msgspec.json.encode(
                {
                    "name": f"chat-1-{number}",
                    "pool": "chat",
                    "generation": 0 if phase == "old" else 1,
                    "ordinal": number,
                    "launcher": "" if phase == "pending" else "local",
                    "phase": "ready" if phase == "old" else phase,
                    "reason": "no memory",
                    "phase_since": since + (-60.0 if phase == "pending" else 60.0),
                }
            )
            for number, phase in enumerate(phases)
        }
        store.fleets.save_records(lease, records)
        result = runner.invoke(app, ["apply", "--wait", "--timeout", "0"])
        assert result.exit_code == 1
        return result.stderr.splitlines()[-1]

    remedy = "; correct it, and repeat the command"
    assert remedy not in wait("failed", "loading", "pending")
    assert remedy not in wait("failed", "ready", "pending")
    assert remedy in wait("failed", "old", "pending")
    error = wait(*["failed"] * 5)
    assert error.count("is failed: no memory") == 3
    assert error.endswith(f"and 2 more, see `argosy status`{remedy}")


def test_wait_ends_if_another_revision_is_applied(store: Store) -> None:
    declare()

    def apply_another() -> None:
        wait_for(lambda: store.fleets.latest_revision("demo"))
        config = load_fleet([Path("fleet.yaml")])
        scaled = dump_fleet(set_replicas(config, "chat", 3), "json").encode()
        store.fleets.apply("demo", scaled, pool_digests(config), author="other")

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(apply_another)
        result = runner.invoke(app, ["apply", "--wait"])
        other.result()
    assert result.exit_code == 1
    assert "other applied revision 2 meanwhile" in result.stderr


@pytest.mark.parametrize("command", ["plan", "apply", "up"])
def test_what_cannot_fit_is_refused_before_anything_changes(command: str, store: Store) -> None:
    declare()
    text = Path("fleet.yaml").read_text()
    for old, new, sentence in (
        ("launcher: local", "replicas: 9999", "9999 replicas of the pool chat cannot run"),
        ("launcher: local", "options: {kv_memory: 900TiB}", "; options.kv_memory of "),
        ("argosy-mini", "./missing", "/missing does not exist on the controller's machine"),
    ):
        Path("fleet.yaml").write_text(text.replace(old, new))
        error = refuse(command)
        assert sentence in error
        assert error.count("\n") == 1
    assert store.fleets.latest_revision("demo") is None


@pytest.mark.parametrize(
    ("arguments", "answer", "revision"),
    [
        (["scale", "chat", "2"], None, 2),
        (["scale", "chat", "3"], "n", 1),
        (["scale", "chat", "3"], "y", 2),
        (["scale", "chat", "3", "--yes"], None, 2),
    ],
)
def test_scale_asks_above_twice_the_present_number(
    arguments: list[str],
    answer: str | None,
    revision: int,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declare()
    assert runner.invoke(app, ["apply"]).exit_code == 0
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("argosy.cli.fleet.sys", terminal)
    result = runner.invoke(app, arguments, input=answer)
    assert "9999 replicas of the pool chat cannot run" in refuse("scale", "chat", "9999")
    asked = "The pool chat gets 3 replicas, more than twice its 1. Apply?" in result.output
    assert asked == (answer is not None), result.output
    latest = store.fleets.latest_revision("demo")
    assert latest is not None
    assert latest.number == revision


@pytest.mark.parametrize(
    "content", ["{fleet: demo, models: [{nam", "fleet: [demo]"], ids=["truncated", "name"]
)
def test_fleet_is_stopped_although_its_file_is_invalid(content: str, store: Store) -> None:
    declare()
    assert runner.invoke(app, ["apply"]).exit_code == 0
    Path("fleet.yaml").write_text(Path("fleet.yaml").read_text() + "no_such_setting: 1\n")
    assert "no_such_setting" in refuse("apply")
    for command in (["scale", "chat", "2"], ["rollback", "1"], ["down"], ["status"]):
        assert runner.invoke(app, command).exit_code == 0, command
    assert "the fleet 'demo' is down; use `argosy up FILE`" in refuse("up", "--fleet", "demo")
    assert "give either files, or --fleet" in refuse("up", "fleet.yaml", "--fleet", "demo")
    Path("fleet.yaml").write_text(content)
    assert "name the fleet with --fleet" in refuse("down")
    assert runner.invoke(app, ["down", "--fleet", "demo"]).exit_code == 0


def test_only_fleet_that_is_not_down_needs_no_name(
    store: Store, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fleet in ("demo", "other"):
        declare()
        Path("fleet.yaml").rename("any.yaml")
        Path("name.yaml").write_text(f"fleet: {fleet}")
        assert runner.invoke(app, ["apply", "any.yaml", "name.yaml"]).exit_code == 0
    assert "(fleets: demo, other)" in refuse("status")
    assert runner.invoke(app, ["down", "--fleet", "demo"]).exit_code == 0
    assert "Fleet other, revision 1" in runner.invoke(app, ["status"]).stdout
    (state / "argosy/fleets/demo").mkdir(parents=True)
    monkeypatch.setattr("argosy.controller_keeper.start_keeper", pytest.fail)  # nothing is to stop
    assert "is down" in runner.invoke(app, ["down", "--fleet", "demo"]).stderr


def test_fleet_that_was_never_applied(store: Store) -> None:
    declare()
    assert "was never applied" in refuse("status")
    assert "no revision 99" in refuse("history", "99")
    assert runner.invoke(app, ["events"]).stdout == "No events.\n"


def write_logs(state: Path) -> Path:
    """Write the logs of a fleet with a gateway, replicas of which one is removed, and a controller."""
    folder = state / "argosy/fleets/demo"
    logs = folder / "replicas/logs"
    logs.mkdir(parents=True)
    lines = {
        logs / "chat-1-0.log": ["10:00:01 info req-1", "10:00:05 error req-2", "raw"],
        logs / "chat-1-1.log": ["10:00:00 info req-3"],
        logs / "gateway-1-0.log": ["10:00:02 warning req-1"],
        folder / "controller.log": ["10:00:03 info -"],
    }
    for path, texts in lines.items():
        path.write_text("".join(f"{format_line(text)}\n" for text in texts))
    return logs


def format_line(text: str) -> str:
    if " " not in text:
        return text
    clock, level, request = text.split()
    event = {"event": "served", "level": level, "timestamp": f"2026-11-28T{clock}Z"}
    return msgspec.json.encode(event | {"request_id": request}).decode()


def read_sources(*arguments: str) -> list[str]:
    """Return of which processes `argosy logs` prints lines."""
    result = runner.invoke(app, ["logs", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return [msgspec.json.decode(line)["source"] for line in result.stdout.splitlines()]


def test_logs_are_selected_and_outlive_replicas_and_fleet(
    store: Store, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/none")
    declare()
    assert runner.invoke(app, ["apply"]).exit_code == 0
    lease = store.fleets.acquire_lease("other", store.fleets.read_lease("demo"))
    assert lease is not None
    places = {"chat": "local", "gateway": "local", "remote": "kubernetes"}
    records = {
        f"replica/{pool}-1-0": msgspec.json.encode(
            {
                "name": f"{pool}-1-0",
                "pool": pool,
                "generation": 1,
                "ordinal": 0,
                "launcher": launcher,
            }
        )
        for pool, launcher in places.items()
    }
    store.fleets.save_records(lease, records)
    run = ReplicaLogRun(started_at=1.0, attempt=1, exited_at=2.0, read_at=3.0)
    store.replica_logs.save(lease, "remote-1-0", run, format_line("09:00:00 info req-1").encode())
    logs = write_logs(state)
    chat = ["chat-1-0"] * 3
    all_sources = ["remote-1-0", "chat-1-0", "gateway-1-0", "controller", "chat-1-0", "chat-1-0"]
    assert read_sources() == all_sources
    assert read_sources("chat") == chat
    assert read_sources("chat", "-n", "1") == ["chat-1-0"]
    assert read_sources("chat-1-1") == ["chat-1-1"]
    assert read_sources("remote") == ["remote-1-0"]
    assert read_sources("gateway", "--level", "warning") == ["gateway-1-0"]
    assert read_sources("controller", "--level", "error") == []
    since = ("--since", "2026-11-28T09:59:59Z")
    assert read_sources("chat", *since) == ["chat-1-1", *chat]
    assert read_sources("--request", "req-1") == ["remote-1-0", "chat-1-0", "gateway-1-0"]
    words = {"COMP_WORDS": "argosy logs ch", "COMP_CWORD": "2", "_ARGOSY_COMPLETE": "complete_bash"}
    completed = runner.invoke(app, [], prog_name="argosy", env=words)
    assert completed.stdout.split() == ["chat", "chat-1-0"]
    with (logs / "chat-1-0.log").open("ab") as log:  # larger than the first reads
        log.write(f"{format_line('10:01:00 info req-4')}\n".encode() * 20_000)
    assert read_sources("chat", "--level", "error") == ["chat-1-0"] * 2
    assert len(read_sources("chat", "--since", "2026-11-28T10:00:30Z")) == 20_000
    store.fleets.save_records(lease, dict.fromkeys(records))
    assert runner.invoke(app, ["down", "--no-wait"]).exit_code == 0
    assert set(read_sources("chat")) == {"chat-1-0", "chat-1-1"}
    assert {"controller", "gateway-1-0"} < set(read_sources())
    text = runner.invoke(app, ["logs", "gateway", "--text"]).stdout
    assert text.startswith("gateway-1-0  2026-11-28 ")
    unmatched = runner.invoke(app, ["logs", "--request", "req-9"])
    assert (unmatched.stdout, unmatched.stderr) == ("", "No line matches the options.\n")
    unknown = runner.invoke(app, ["logs", "other"])
    assert (unknown.exit_code, "pools with logs: " in unknown.stderr) == (1, True)


def follow_logs(
    monkeypatch: pytest.MonkeyPatch, steps: Iterable[Callable[[], object]], *arguments: str
) -> list[str]:
    """Return the lines that `argosy logs -f` prints of chat-1-0 while the steps happen, one between two reads."""
    remaining = iter(steps)

    def sleep(_interval_s: float) -> None:
        step = next(remaining, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr("argosy.cli.fleet_logs.time.sleep", sleep)
    result = runner.invoke(app, ["logs", "chat-1-0", "-f", "--text", *arguments])
    assert (result.exit_code, "left out" in result.stderr) == (130, False)
    return [line.removeprefix("chat-1-0  ") for line in result.stdout.splitlines()]


def test_logs_are_followed_also_when_they_are_rotated(
    store: Store, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare()
    assert runner.invoke(app, ["apply"]).exit_code == 0
    path = write_logs(state) / "chat-1-0.log"
    steps: list[Callable[[], object]] = [
        lambda: path.rename(f"{path}.1"),
        lambda: path.write_text("first\nsec"),
        lambda: path.write_text("first\nsecond\nthird\n"),
    ]
    lines = follow_logs(monkeypatch, steps, "-n", "1")
    assert lines == ["raw", "first", "sec", "second", "third"]


@pytest.mark.parametrize("is_from_gateway", [False, True])
def test_recorded_runs_are_followed_each_for_itself(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, is_from_gateway: bool
) -> None:
    declare()
    assert runner.invoke(app, ["apply"]).exit_code == 0
    lease = store.fleets.acquire_lease("other", store.fleets.read_lease("demo"))
    assert lease is not None

    def save(started_at: float, *lines: str) -> None:
        run = ReplicaLogRun(started_at=started_at, attempt=1, read_at=9.0)
        store.replica_logs.save(lease, "chat-1-0", run, "\n".join(lines).encode())

    def answer(path: str, parameters: dict[str, Any]) -> object:
        if path == "/admin/fleet":
            return msgspec.to_builtins(read_fleet_status(store.fleets, "demo"))
        runs = store.replica_logs.list_runs("demo", "chat-1-0")
        log = store.replica_logs.read_log(
            "demo", "chat-1-0", parameters.get("started_at") or runs[0].started_at
        )
        return {"runs": msgspec.to_builtins(runs), "lines": log.decode().split("\n")}

    monkeypatch.setattr(
        "argosy.cli.fleet_status.call_admin_api",
        lambda _url, _key, _method, path, **options: answer(path, options["parameters"]),
    )
    save(1.0, "a", "b")
    save(2.0, "c", "d")
    place = ["--url", "http://gateway"] if is_from_gateway else []
    steps = [lambda: save(2.0, "d", "e"), lambda: save(3.0, "f")]
    assert follow_logs(monkeypatch, steps, "-n", "3", *place) == ["b", "c", "d", "e", "f"]
    if is_from_gateway:  # which has selected the lines of a crash, although they have no times
        assert follow_logs(monkeypatch, [], "--since", "1h", *place) == [*"abdef"]
