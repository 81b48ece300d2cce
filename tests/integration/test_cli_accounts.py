"""The commands on accounts: keys, tenants, usage and the audit log, on a store of their own."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.store import Store, UsageRecord, hash_key, open_store

runner = CliRunner()


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store that does not exist yet, and that the commands find."""
    monkeypatch.setenv("ARGOSY_STORE", f"sqlite:///{tmp_path}/state/argosy.db")
    return os.environ["ARGOSY_STORE"]


def run(*arguments: str) -> str:
    """What a command prints; it succeeds."""
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def told(*arguments: str) -> Any:  # noqa: ANN401 - JSON
    """What a command prints as JSON."""
    return json.loads(run(*arguments, "--json"))


def refused(*arguments: str) -> str:
    """The sentence of a command that cannot be done."""
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def opened(url: str) -> Store:
    return open_store(url)


def test_the_first_key_takes_one_command(url: str) -> None:
    plain = run("keys", "create").strip()
    store = opened(url)
    (key,) = store.load_snapshot().keys
    (project,) = store.load_snapshot().projects
    (first,) = store.audit_log.list_entries(limit=1)
    store.close()
    assert (key.digest, key.role, key.name) == (hash_key(plain), "user", "key-1")
    assert (project.name, first.action) == ("default", "key.create")
    assert first.actor.startswith("cli")
    assert plain[18:] not in run("keys", "list")
    assert run("keys", "create").strip() != plain


@pytest.mark.parametrize(
    "command",
    [
        ("usage",),
        ("audit", "verify"),
        ("keys", "list"),
        ("keys", "revoke", "app"),
        ("tenants", "list"),
        ("tenants", "limits", "set", "tokens", "5", "-p", "default"),
        ("tenants", "prices", "list"),
        ("tenants", "organisations", "list"),
        ("tenants", "users", "create", "ann@acme.test"),
    ],
)
def test_a_mistyped_store_is_not_made(url: str, tmp_path: Path, command: tuple[str, ...]) -> None:
    assert "There is no Argosy store in" in refused(*command)
    assert not (tmp_path / "state").exists()
    others = tmp_path / "others.db"
    with contextlib.closing(sqlite3.connect(others)) as database:
        database.execute("CREATE TABLE bookmarks (id)")
        assert "argosy keys create" in refused(*command, "--store", f"sqlite:///{others}")
        assert database.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (1,)


def test_keys_are_made_with_everything_they_may_have(url: str) -> None:
    run("tenants", "create", "chat")
    run("tenants", "users", "create", "ann@acme.test", "--project", "chat")
    made = told(
        *("keys", "create", "app", "--project", "default/chat", "--role", "operator"),
        *("--user", "ann@acme.test", "--model", "big", "--model", "small"),
        *("--network", "10.0.0.0/8", "--expires", "90d", "--flag", "new", "--flag", "old"),
    )
    assert made["key"].startswith(made["prefix"])
    assert "digest" not in made
    assert (made["role"], made["models"], made["networks"]) == (
        "operator",
        ["big", "small"],
        ["10.0.0.0/8"],
    )
    assert made["flags"] == ["new", "old"]
    assert made["expires_at"] == pytest.approx(time.time() + 90 * 86400, abs=60)
    (listed,) = told("keys", "list", "--project", "chat")
    assert listed["user"] is not None


def test_roles_are_given_for_the_gateway_or_in_an_organisation(url: str) -> None:
    def scope(*options: str) -> str:
        made: str = told("keys", "create", *options)["scope"]
        return made

    assert scope("--role", "admin") == "gateway", "the first, by whoever runs the machine"
    run("tenants", "organisations", "create", "acme")
    run("tenants", "create", "web", "-o", "acme")
    assert scope("--role", "admin", "-p", "web") == "organisation"
    assert scope("--role", "viewer", "-p", "web", "--scope", "gateway") == "gateway"
    assert scope("--role", "viewer", "--scope", "organisation") == "organisation"
    assert scope() == scope("-p", "web") == "organisation"
    assert "gateway" in run("keys", "list")
    user = told("tenants", "users", "create", "ann@acme.test", "-o", "acme", "--role", "admin")
    assert user["scope"] == "organisation"
    changed = told("tenants", "users", "change", "ann@acme.test", "--scope", "gateway")
    assert (changed["role"], changed["scope"]) == ("admin", "gateway")
    assert "gateway" in run("tenants", "users", "list")


def test_a_key_is_rotated_and_revoked_by_what_people_call_it(url: str) -> None:
    first = told("keys", "create", "app")
    second = told("keys", "rotate", "app", "--overlap", "1h")
    assert second["name"] == "app"
    old = next(key for key in told("keys", "list") if key["id"] == first["id"])
    assert old["replaced_by"] == second["id"]
    assert old["expires_at"] == pytest.approx(time.time() + 3600, abs=60)
    run("keys", "revoke", first["key"])
    assert told("keys", "revoke", "app")["id"] == second["id"]
    assert told("keys", "list") == []
    assert len(told("keys", "list", "--all")) == 2


def test_tenants_change_and_end(url: str) -> None:
    run("tenants", "organisations", "create", "acme")
    run("tenants", "create", "chat", "-o", "acme", "--tier", "premium", "--weight", "2")
    assert "premium" in run("tenants", "list")
    changed = told("tenants", "change", "chat", "--share-cache", "--network", "10.0.0.0/8")
    assert (changed["share_cache"], changed["tier"]) == (True, "premium")
    assert told("tenants", "change", "chat", "--clear-networks")["networks"] == []
    assert told("tenants", "change", "chat", "--flag", "new")["flags"] == ["new"]
    assert told("tenants", "change", "chat", "--clear-flags")["flags"] == []
    assert "not both" in refused("tenants", "change", "chat", "--clear-flags", "--flag", "new")
    run("tenants", "organisations", "rename", "acme", "zeta")
    run("tenants", "users", "create", "ann@acme.test", "-o", "zeta")
    user = told("tenants", "users", "change", "ann@acme.test", "--role", "viewer", "-p", "chat")
    assert user["role"] == "viewer"
    run("tenants", "users", "disable", "ann@acme.test")
    assert "ann@acme.test" in run("tenants", "users", "list")
    run("tenants", "archive", "chat")
    run("tenants", "organisations", "archive", "zeta")
    assert "zeta" in run("tenants", "organisations", "list")
    assert "there is no project 'chat'" in refused("keys", "create", "--project", "chat")


def test_limits_and_prices_are_exact(url: str) -> None:
    run("keys", "create", "app")
    limits = ("tenants", "limits")
    money = told(*limits, "set", "dollars", "12.5", "--per", "month", "-p", "default")
    assert (money["unit"], money["amount"]) == ("nano_dollars", 12_500_000_000)
    run(*limits, "set", "tokens", "100,000", "--key", "app", "--model", "big")
    run(*limits, "set", "concurrency", "4", "-o", "default")
    shown = run(*limits, "list")
    assert "$12.50" in shown
    assert "100,000" in shown
    run(*limits, "delete", money["id"])
    assert len(told(*limits, "list")) == 2
    prices = ("tenants", "prices")
    price = told(*prices, "set", "big", "--input", "0.15", "--cached", "0.075", "--output", "0.6")
    assert (price["input"], price["cached_input"], price["output"]) == (150, 75, 600)
    assert "$0.075" in run(*prices, "list")
    planned = ("set", "big", "--input", "1", "--output", "2", "--since")
    assert "$2.00 from 2050-01-01 00:00 UTC on." in run(*prices, *planned, "2050-01-01")
    assert told(*prices, *planned, "30d")["since"] > time.time()


def test_the_default_project_is_there_when_it_is_meant_whatever_was_made_before(url: str) -> None:
    said = run("tenants", "create", "a shop")
    assert "argosy keys create -p 'a shop'" in said
    run("tenants", "organisations", "create", "zeta")
    run("tenants", "create", "default", "-o", "zeta")
    keys = [told("keys", "create", "--role", "admin"), told("keys", "create")]
    (home,) = {key["project"] for key in keys}
    project = next(item for item in told("tenants", "list") if item["id"] == home)
    owner = next(o for o in told("tenants", "organisations", "list") if o["name"] == "default")
    assert (project["name"], project["organisation"]) == ("default", owner["id"])
    run("tenants", "archive", home)
    assert told("keys", "create")["project"] != home


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("keys", "rotate", "nobody"), "there is no key 'nobody'; see `argosy keys list --all`"),
        (("keys", "create", "--expires", "soon"), "write a date like"),
        (("keys", "create", "--expires", "9999999d"), "within the years"),
        (("keys", "rotate", "app", "--overlap", "99999999999d"), "expires_at"),
        (("usage", "--since", "99999999999999999999d"), "within the years"),
        (("keys", "create", "--network", "10.0.0.0/99"), "10.0.0.0/99"),
        (("keys", "create", "--role", "king"), "king"),
        (("tenants", "create", "x", "-o", "nobody"), "there is no organisation 'nobody'"),
        (("tenants", "limits", "set", "tokens", "many", "-p", "default"), "'many' is not a whole"),
        (("tenants", "limits", "set", "dollars", "x", "-p", "default"), "12.50"),
        (("tenants", "limits", "set", "tokens", "5"), "give exactly one of --organisation"),
        (
            ("tenants", "limits", "set", "concurrency", "4", "--per", "day", "-p", "default"),
            "Only a limit on concurrency has none",
        ),
        (("tenants", "prices", "set", "x", "--input", "0.0001", "--output", "1"), "too fine"),
        (("tenants", "prices", "set", "x", "--input", "1e999999", "--output", "1"), "not an amount"),
        (("tenants", "prices", "set", "x", "--input", "1e9", "--output", "1"), "at most 1,000,000"),
        (("tenants", "limits", "set", "dollars", "1e10", "-p", "default"), "at most 9,223,372,036"),
        (("usage", "--by", "colour"), "A report can be grouped by"),
        (("audit", "--limit", "99999999999999999999"), "to 1000000"),
        (("explain", "\udcff", "--url", "http://127.0.0.1:1"), "no gateway answers"),
        (("usage", "--since", "yesterday"), "write a date like"),
        (("keys", "list", "--store", "mysql://x"), "sqlite:///path"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(url: str, command: tuple[str, ...], said: str) -> None:
    run("keys", "create", "app")
    assert said in refused(*command)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("tenants", "change", "web"), "nothing to change"),
        (("tenants", "change", "web", "--name", ""), "length >= 1 - at `$.name`"),
        (("tenants", "change", "web", "--network", "::/0", "--clear-networks"), "not both"),
        (("tenants", "users", "change", "ann@acme.test"), "nothing to change"),
        (
            ("tenants", "users", "change", "ann@acme.test", "--email", ""),
            "length >= 1 - at `$.email`",
        ),
        (("keys", "create", ""), "length >= 1 - at `$.name`"),
    ],
)
def test_a_change_of_nothing_is_none(url: str, command: tuple[str, ...], said: str) -> None:
    run("tenants", "create", "web")
    run("tenants", "users", "create", "Ann@Acme.test")
    assert said in refused(*command)


def test_a_name_is_shown_as_it_is(url: str) -> None:
    run("tenants", "create", "[bold]:fire: x")
    assert "[bold]:fire: x" in run("tenants", "list")


def test_nobody_commands_the_terminal_of_an_operator(url: str) -> None:
    run("keys", "create")
    store = opened(url)
    row: dict[str, Any] = {
        "request": "r",
        "user": "\x1b[2Jann",
        "model": "m",
        "started_at": 1.0,
        "ended_at": 2.0,
    }
    store.ledger.add_records([UsageRecord(status="completed", **row)])
    store.close()
    assert "\ufffd[2Jann" in run("usage", "--by", "user")


def test_nobody_is_in_the_way_of_an_id_by_taking_it_for_a_name(url: str) -> None:
    web, zeta = told("tenants", "create", "web"), told("tenants", "organisations", "create", "zeta")
    run("tenants", "organisations", "create", zeta["id"])
    run("tenants", "create", web["id"], "-o", "zeta")
    run("tenants", "create", "default/web", "-o", "zeta")
    assert told("tenants", "change", web["id"], "--weight", "2")["id"] == web["id"]
    assert told("tenants", "create", "shop", "-o", zeta["id"])["organisation"] == zeta["id"]
    run("tenants", "users", "create", "Ann@Acme.test", "-o", "zeta")
    run("tenants", "users", "disable", "Ann@Acme.test")


def test_usage_of_who_has_ended_is_told_apart_from_who_has_their_name(url: str) -> None:
    gone = told("tenants", "create", "shop")
    run("tenants", "archive", "shop")
    now = told("tenants", "create", "shop")
    store = opened(url)
    for project, count in ((gone, 1), (now, 2)):
        for number in range(count):
            row = UsageRecord(
                request=f"{project['id']}-{number}",
                organisation=project["organisation"],
                project=project["id"],
                started_at=time.time(),
                ended_at=time.time(),
                status="completed",
            )
            store.ledger.add_records([row])
    store.close()
    shown = run("usage", "--by", "project")
    assert f"shop ({gone['id']})" in shown
    assert f"shop ({now['id']})" in shown
    for name, count in (("shop", 2), (now["id"], 2), (gone["id"], 1)):
        assert told("usage", "--by", "", "--project", name)[0]["requests"] == count
    assert "ended" in refused("keys", "create", "late", "--project", gone["id"])
    run("tenants", "archive", gone["id"])
    limit = ("tenants", "limits", "set", "tokens", "9", "--per", "day")
    assert "ended" in refused(*limit, "--project", gone["id"])
    home = gone["organisation"]
    run("tenants", "organisations", "archive", home)
    assert told("usage", "--by", "", "--organisation", home)[0]["requests"] == 3


def test_usage_is_summed_by_name_and_exported(url: str, tmp_path: Path) -> None:
    key = told("keys", "create", "app")
    store = opened(url)
    row = UsageRecord(
        request="r1",
        organisation=store.accounts.get_project(key["project"]).organisation,
        project=key["project"],
        key=key["id"],
        model="big",
        asked="default",
        route="beta",
        replica="r1",
        started_at=time.time(),
        ended_at=time.time(),
        status="completed",
        input_tokens=1000,
        output_tokens=234,
        nano_dollars=1_500_000,
    )
    store.ledger.add_records([row])
    store.close()
    shown = run("usage", "--by", "project,key", "--since", "1d", "--key", "app")
    assert "default" in shown
    assert f"app ({key['prefix']}-...)" in shown
    assert "$0.0015" in shown
    (total,) = told("usage", "--by", "", "--project", "default", "--organisation", "default")
    assert total["output_tokens"] == 234
    assert "There is no usage." in run("usage", "--until", "30d")
    twice = run("usage", "--by", "model, model", "--csv", "-").splitlines()
    assert twice[0].startswith("model,requests")
    assert run("usage", "--by", "model,model").count("Model") == 1
    ways = run("usage", "--by", "asked,route,replica").split()
    assert {"Asked", "Route", "Replica", "default", "beta", "r1"} <= set(ways)
    for option, name in (("--asked", "default"), ("--route", "beta"), ("--replica", "r1")):
        assert told("usage", "--by", "", option, name) == [total]
        assert told("usage", "--by", "model", option, "big") == []
    assert run("usage", "--csv", "-").splitlines()[1].startswith("r1,")
    run("usage", "--csv", str(tmp_path / "rows.csv"))
    assert (tmp_path / "rows.csv").read_text() == run("usage", "--csv", "-")
    sums = run("usage", "--by", "model,key", "--csv", "-").splitlines()
    assert sums[0] == "model,key,requests,input_tokens,cached_tokens,output_tokens,nano_dollars"
    assert sums[1:] == [f"big,{key['id']},1,1000,0,234,1500000"]
    assert "not by 'tier'" in refused("usage", "--by", "tier", "--csv", "-")
    assert "give one of --json and --csv" in refused("usage", "--json", "--csv", "-")
    assert "cannot write" in refused("usage", "--csv", str(tmp_path / "none" / "rows.csv"))


@pytest.mark.parametrize("terminal", ["1", ""])
def test_all_is_shown_whole(url: str, monkeypatch: pytest.MonkeyPatch, terminal: str) -> None:
    """Beside names that are longer than the terminal is wide, and in a pipe; ids are there to be copied."""
    monkeypatch.setenv("FORCE_COLOR", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    name = "long" * 50
    key = told("keys", "create", name)
    run("tenants", "prices", "set", name, "--input", "123456.789", "--output", "0.001")
    row = UsageRecord(
        request="r1",
        project=key["project"],
        key=key["id"],
        model=name,
        started_at=time.time(),
        ended_at=time.time(),
        status="completed",
        input_tokens=1_234_567,
        nano_dollars=12_345_678_901_234,
    )
    store = opened(url)
    store.ledger.add_records([row])
    store.close()
    for shown in (run("usage", "--by", "key,model"), run("tenants", "prices", "list")):
        assert name in shown
    listed = run("keys", "list")
    assert {key["id"], f"{key['prefix']}-..."} <= set(listed.split())
    assert ("┃" in listed) is not bool(terminal), "a table where there is room for one"
    usage = run("usage", "--by", "key,model")
    assert "1,234,567" in usage
    assert "$12,345.678901234" in usage
    assert "$123,456.789" in run("tenants", "prices", "list")


def test_the_audit_log_is_listed_and_checked(url: str) -> None:
    run("keys", "create", "app")
    assert "key.create" in run("audit")
    assert [entry["action"] for entry in told("audit", "--limit", "1")] == ["key.create"]
    run("tenants", "organisations", "create", "acme")
    (own,) = told("audit", "--organisation", "acme")
    assert own["action"] == "organisation.create"
    assert "All 4 entries" in run("audit", "verify")
    assert told("audit", "verify")["broken"] is None
    for part in ("--organisation", "--subject", "--limit"):
        assert "only the whole log can be verified" in refused("audit", "verify", part, "1")


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    environment.pop("ARGOSY_STORE", None)
    command = [sys.executable, "-m", "argosy.cli", "keys", "create", "app"]
    made = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert made.stdout.startswith("sk-argosy-")
    assert made.stdout.count("\n") == 1, "so that KEY=$(argosy keys create) works"
    again = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert (tmp_path / "argosy" / "argosy.db").stat().st_mode & 0o077 == 0


def test_a_terminal_without_the_letters_is_shown_what_it_has(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    run("keys", "create", "clé", "--store", url)
    done = subprocess.run(
        [sys.executable, "-m", "argosy.cli", "keys", "list", "--store", url],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "cl?" in done.stdout


def test_a_store_is_copied(url: str, tmp_path: Path) -> None:
    run("keys", "create")
    copy = f"sqlite:///{tmp_path}/backup/argosy.db"
    done = runner.invoke(app, ("store", "copy", copy))
    assert (done.exit_code, "still in" in done.output) == (0, False)
    assert run("audit", "verify", "--store", copy) == run("audit", "verify")
    assert told("keys", "list", "--store", copy) == told("keys", "list")
    assert "is not empty" in refused("store", "copy", copy)
    assert "no Argosy store" in refused("store", "copy", copy, "--store", f"sqlite:///{tmp_path}/no")
    (Path(f"{tmp_path}/state/argosy.db.usage")).mkdir()
    (tmp_path / "state" / "argosy.db.usage" / "1.usage").touch()
    done = runner.invoke(app, ("store", "copy", f"sqlite:///{tmp_path}/another.db"))
    assert "Its latest usage is still in" in done.output
