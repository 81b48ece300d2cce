"""Account commands of the CLI: parsing, names of records, output and errors. The store's tests cover the rules."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.migrated_store import open_migrated_store
from tests.support.usage_rows import usage_row
from typer.testing import CliRunner

from argosy.cli import main
from argosy.cli.app import app
from argosy.store import Store, UsageRecord, hash_key, open_store

DAY = 86_400.0

runner = CliRunner()


@pytest.fixture
def new_store_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a store that does not exist yet. The commands use it by default."""
    path = tmp_path / "state" / "argosy.db"
    monkeypatch.setenv("ARGOSY_STORE", f"sqlite:///{path}")
    return path


@pytest.fixture
def store_url(new_store_path: Path) -> str:
    """URL of a store without accounts. The commands use it by default."""
    new_store_path.parent.mkdir()
    url = f"sqlite:///{new_store_path}"
    open_migrated_store(url).close()
    return url


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """The same store, opened by the test."""
    with contextlib.closing(open_store(store_url)) as opened:
        yield opened


def run(*arguments: str) -> str:
    """Run a command that succeeds. Returns its standard output."""
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(*arguments: str) -> Any:  # noqa: ANN401 - JSON
    return json.loads(run(*arguments, "--json"))


def run_rejected(*arguments: str) -> str:
    """Run a command that fails. Returns its error message on one line."""
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    return " ".join(result.output.replace("│", " ").split())


def recent_row(request: str, **fields: Any) -> UsageRecord:  # noqa: ANN401 - any field of the record
    return usage_row(request, **{"ended_at": time.time(), "cached_tokens": 0} | fields)


# --- first use of a store ------------------------------------------------------------------------


def test_first_key_needs_one_command(new_store_path: Path) -> None:
    first = runner.invoke(app, ["keys", "create"])
    assert first.stdout.startswith("sk-argosy-")
    assert first.stdout.count("\n") == 1, "a shell assigns the key with $(argosy keys create)"
    # The server may use another store, in which this key does not exist.
    assert f"Created a new store in {new_store_path}" in " ".join(first.stderr.split())
    assert "--store" in first.stderr
    plain = first.stdout.strip()
    with contextlib.closing(open_store(f"sqlite:///{new_store_path}")) as store:
        (key,) = store.load_snapshot().keys
        (project,) = store.load_snapshot().projects
        (entry,) = store.audit_log.list_entries(limit=1)
    assert (key.digest, key.role, key.name) == (hash_key(plain), "user", "key-1")
    assert (project.name, entry.action) == ("default", "key.create")
    assert entry.actor.startswith("cli")
    assert plain[18:] not in run("keys", "list")
    second = runner.invoke(app, ["keys", "create"])
    assert second.stdout.strip() != plain
    assert "new store" not in second.stderr
    rejected = runner.invoke(app, ["keys", "create", "key-1"])
    assert (rejected.exit_code, rejected.stderr.count("\n")) == (2, 1)


def test_default_store_is_a_private_file_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ARGOSY_STORE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run("keys", "create")
    assert (tmp_path / "argosy" / "argosy.db").stat().st_mode & 0o077 == 0


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
def test_missing_store_is_reported_and_not_created(
    new_store_path: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    assert "There is no Argosy store in" in run_rejected(*command)
    assert not new_store_path.parent.exists()
    foreign = tmp_path / "foreign.db"
    with contextlib.closing(sqlite3.connect(foreign)) as database:
        database.execute("CREATE TABLE bookmarks (id)")
        rejected = run_rejected(*command, "--store", f"sqlite:///{foreign}")
        assert "argosy keys create" in rejected
        assert database.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (1,)


def test_store_is_copied(store_url: str, tmp_path: Path) -> None:
    run("keys", "create")
    copy = f"sqlite:///{tmp_path}/backup/argosy.db"
    result = runner.invoke(app, ("store", "copy", copy))
    assert result.exit_code == 0
    assert "still in" not in result.output
    assert "new store" not in result.output
    assert run("audit", "verify", "--store", copy) == run("audit", "verify")
    assert run_json("keys", "list", "--store", copy) == run_json("keys", "list")
    assert "is not empty" in run_rejected("store", "copy", copy)
    missing = f"sqlite:///{tmp_path}/missing"
    assert "no Argosy store" in run_rejected("store", "copy", copy, "--store", missing)
    usage_log = tmp_path / "state" / "argosy.db.usage"
    usage_log.mkdir()
    (usage_log / "1.usage").touch()
    result = runner.invoke(app, ("store", "copy", f"sqlite:///{tmp_path}/another.db"))
    assert "Its latest usage is still in" in result.output


def test_store_is_backed_up_and_restored(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    run("keys", "create")
    backups, new = str(tmp_path / "backups"), f"sqlite:///{tmp_path}/new.db"
    run("backup", "create", backups)
    backup = run("backup", "create", backups, "--keep", "1").strip()
    (listed,) = run_json("backup", "list", backups)
    assert (listed["id"], listed["audit_entries"], backup in run("backup", "list", backups)) == (
        *(backup, 3, True),
    )
    assert f"{backup} is whole" in run("backup", "verify", backups)
    assert "3 entries of the audit log" in run("backup", "restore", backups, "--store", new)
    assert run_json("keys", "list", "--store", new) == run_json("keys", "list")
    assert "exists. Stop its gateways" in run_rejected("backup", "restore", backups)
    (content,) = (tmp_path / "backups").rglob(listed["parts"][0]["sha256"])
    content.write_bytes(content.read_bytes()[:-1])
    damaged = runner.invoke(app, ("backup", "verify", backups, "--json"))
    assert damaged.exit_code == 1
    assert f"store argosy.db (content/{content.parent.name}/{content.name})" in damaged.output
    assert "has no backup" in run_rejected("backup", "restore", str(tmp_path / "none"))


# --- keys and tenants ----------------------------------------------------------------------------


def test_key_options_are_stored(store_url: str) -> None:
    run("tenants", "create", "chat")
    run("tenants", "users", "create", "ann@acme.test", "--project", "chat")
    created = run_json(
        *("keys", "create", "app", "--project", "default/chat", "--role", "operator"),
        *("--user", "ann@acme.test", "--model", "big", "--model", "small"),
        *("--network", "10.0.0.0/8", "--expires", "90d", "--flag", "new", "--flag", "old"),
    )
    assert created["key"].startswith(created["prefix"])
    assert "digest" not in created
    assert (created["role"], created["models"]) == ("operator", ["big", "small"])
    assert (created["networks"], created["flags"]) == (["10.0.0.0/8"], ["new", "old"])
    assert created["expires_at"] == pytest.approx(time.time() + 90 * DAY, abs=60)
    (listed,) = run_json("keys", "list", "--project", "chat")
    assert listed["user"] is not None


def test_roles_apply_to_the_gateway_only_for_the_first_keys_organisation(store_url: str) -> None:
    def create_key(*options: str) -> str:
        scope: str = run_json("keys", "create", *options)["scope"]
        return scope

    assert create_key("--role", "admin") == "gateway"
    run("tenants", "organisations", "create", "acme")
    run("tenants", "create", "web", "-o", "acme")
    assert create_key("--role", "admin", "-p", "web") == "organisation"
    for options, owner in (
        (("--role", "admin"), "API key with the role admin of the whole gateway."),
        (
            ("--role", "viewer", "-p", "web"),
            "API key with the role viewer of the organisation 'acme'.",
        ),
        ((), "API key of the project 'default'."),
    ):
        assert runner.invoke(app, ("keys", "create", *options)).stderr.startswith(owner)
    assert create_key("--role", "viewer", "-p", "web", "--scope", "gateway") == "gateway"
    assert create_key("--role", "viewer", "--scope", "organisation") == "organisation"
    assert create_key() == create_key("-p", "web") == "organisation"
    assert "gateway" in run("keys", "list")
    users = ("tenants", "users")
    user = run_json(*users, "create", "ann@acme.test", "-o", "acme", "--role", "admin")
    assert user["scope"] == "organisation"
    changed = run_json(*users, "change", "ann@acme.test", "--scope", "gateway")
    assert (changed["role"], changed["scope"]) == ("admin", "gateway")
    assert "gateway" in run(*users, "list")


def test_keys_are_rotated_and_revoked_by_name_or_plain_key(store_url: str) -> None:
    first = run_json("keys", "create", "app")
    second = run_json("keys", "rotate", "app", "--overlap", "1h")
    assert second["name"] == "app"
    (old,) = [key for key in run_json("keys", "list") if key["id"] == first["id"]]
    assert old["replaced_by"] == second["id"]
    assert old["expires_at"] == pytest.approx(time.time() + 3600, abs=60)
    revoked = runner.invoke(app, ["keys", "revoke", "app"]).output
    assert second["id"][4:12] in revoked
    assert f"argosy keys revoke {first['id']}" in revoked, "the old key is still valid"
    assert "older key" not in runner.invoke(app, ["keys", "revoke", first["key"]]).output
    assert run_json("keys", "list") == []
    assert len(run_json("keys", "list", "--all")) == 2


def test_tenants_are_changed_and_archived(store_url: str) -> None:
    run("tenants", "organisations", "create", "acme")
    run("tenants", "create", "chat", "-o", "acme", "--tier", "premium", "--weight", "2")
    assert "premium" in run("tenants", "list")

    def change(*options: str) -> Any:  # noqa: ANN401 - JSON
        return run_json("tenants", "change", "chat", *options)

    changed = change("--share-cache", "--network", "10.0.0.0/8", "--flag", "new")
    assert (changed["share_cache"], changed["tier"]) == (True, "premium")
    assert (changed["networks"], changed["flags"]) == (["10.0.0.0/8"], ["new"])
    assert change("--clear-networks")["networks"] == []
    assert change("--clear-flags")["flags"] == []
    run("tenants", "organisations", "rename", "acme", "zeta")
    run("tenants", "users", "create", "ann@acme.test", "-o", "zeta")
    user = run_json("tenants", "users", "change", "ann@acme.test", "--role", "viewer", "-p", "chat")
    assert user["role"] == "viewer"
    run("tenants", "users", "disable", "ann@acme.test")
    assert "ann@acme.test" in run("tenants", "users", "list")
    run("tenants", "archive", "chat")
    run("tenants", "organisations", "archive", "zeta")
    assert "zeta" in run("tenants", "organisations", "list")
    assert "there is no project 'chat'" in run_rejected("keys", "create", "--project", "chat")


def test_limits_and_prices_are_exact(store_url: str) -> None:
    run("keys", "create", "app")
    limits, prices = ("tenants", "limits"), ("tenants", "prices")
    cost = run_json(*limits, "set", "dollars", "12.5", "--per", "month", "-p", "default")
    assert (cost["unit"], cost["amount"]) == ("nano_dollars", 12_500_000_000)
    run(*limits, "set", "tokens", "100,000", "--key", "app", "--model", "big")
    run(*limits, "set", "concurrency", "4", "-o", "default")
    table = run(*limits, "list")
    assert "$12.50" in table
    assert "100,000" in table
    run(*limits, "delete", cost["id"])
    assert len(run_json(*limits, "list")) == 2
    price = run_json(
        *prices, "set", "big", "--input", "0.15", "--cached", "0.075", "--output", "0.6"
    )
    assert (price["input"], price["cached_input"], price["output"]) == (150, 75, 600)
    assert "$0.075" in run(*prices, "list")
    planned = (*prices, "set", "big", "--input", "1", "--output", "2", "--since")
    assert "$2.00 from 2050-01-01 00:00+00:00 on." in run(*planned, "2050-01-01T00:00Z")
    assert run_json(*planned, "30d")["since"] > time.time()


# --- names and ids of records --------------------------------------------------------------------


def test_default_project_is_created_when_it_is_first_used(store_url: str) -> None:
    run("tenants", "create", "a shop")
    run("tenants", "organisations", "create", "zeta")
    run("tenants", "create", "default", "-o", "zeta")
    keys = [run_json("keys", "create", "--role", "admin"), run_json("keys", "create")]
    (default,) = {key["project"] for key in keys}
    (project,) = [item for item in run_json("tenants", "list") if item["id"] == default]
    organisations = run_json("tenants", "organisations", "list")
    (owner,) = [item for item in organisations if item["name"] == "default"]
    assert (project["name"], project["organisation"]) == ("default", owner["id"])
    run("tenants", "archive", default)
    assert run_json("keys", "create")["project"] != default


def test_key_without_a_default_organisation_needs_a_project(store_url: str) -> None:
    run("tenants", "organisations", "create", "zeta")
    run("tenants", "create", "shop", "-o", "zeta")
    assert "--project" in run_rejected("keys", "create", "ops", "--role", "admin")
    assert "--organisation" in run_rejected("tenants", "create", "web")
    key = run_json("keys", "create", "ops", "--role", "admin", "-p", "shop", "--scope", "gateway")
    assert key["scope"] == "gateway"


def test_command_shown_for_a_new_project_selects_that_project(store_url: str) -> None:
    assert "argosy keys create -p 'a shop'" in run("tenants", "create", "a shop")
    for owner in ("zeta", "eta"):
        run("tenants", "organisations", "create", owner)
        _, _, command = run("tenants", "create", "shop", "-o", owner).partition("argosy ")
        project = run_json("tenants", "list")[-1]["id"]
        assert run_json(*shlex.split(command))["project"] == project


def test_id_takes_precedence_over_an_equal_name(store_url: str) -> None:
    web = run_json("tenants", "create", "web")
    zeta = run_json("tenants", "organisations", "create", "zeta")
    run("tenants", "organisations", "create", zeta["id"])
    run("tenants", "create", web["id"], "-o", "zeta")
    run("tenants", "create", "default/web", "-o", "zeta")
    assert run_json("tenants", "change", web["id"], "--weight", "2")["id"] == web["id"]
    assert run_json("tenants", "create", "shop", "-o", zeta["id"])["organisation"] == zeta["id"]
    run("tenants", "users", "create", "Ann@Acme.test", "-o", "zeta")
    run("tenants", "users", "disable", "Ann@Acme.test")


def test_usage_of_archived_and_new_projects_of_one_name_is_separate(store: Store) -> None:
    archived = run_json("tenants", "create", "shop")
    run("tenants", "archive", "shop")
    new = run_json("tenants", "create", "shop")
    for number, project in enumerate((archived, new, new)):
        owners = {"organisation": project["organisation"], "project": project["id"]}
        store.ledger.add_records([recent_row(f"r{number}", **owners)])
    table = run("usage", "--by", "project")
    assert f"shop ({archived['id']})" in table
    assert f"shop ({new['id']})" in table
    for name, count in (("shop", 2), (new["id"], 2), (archived["id"], 1)):
        assert run_json("usage", "--by", "", "--project", name)[0]["requests"] == count
    assert "ended" in run_rejected("keys", "create", "late", "--project", archived["id"])
    run("tenants", "archive", archived["id"])
    home = archived["organisation"]
    run("tenants", "organisations", "archive", home)
    assert run_json("usage", "--by", "", "--organisation", home)[0]["requests"] == 3


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("keys", "rotate", "absent"), "there is no key 'absent'; see `argosy keys list --all`"),
        (("keys", "create", "--expires", "soon"), "'soon' is not a date or time"),
        (("keys", "create", "--expires", "9999999d"), "within the years"),
        (("keys", "create", "--role", "king"), "king"),
        (("keys", "create", ""), "length >= 1 - at `$.name`"),
        (("keys", "list", "--store", "mysql://x"), "sqlite:///path"),
        (("tenants", "create", "x", "-o", "absent"), "there is no organisation 'absent'"),
        (("tenants", "change", "web"), "nothing to change"),
        (("tenants", "change", "web", "--network", "::/0", "--clear-networks"), "not both"),
        (("tenants", "change", "web", "--flag", "new", "--clear-flags"), "not both"),
        (
            ("keys", "create", "--flag", "stream-pacing-token"),
            "Did you mean 'stream-pacing-tokens'",
        ),
        (("tenants", "users", "change", "ann@acme.test"), "nothing to change"),
        (("tenants", "limits", "set", "tokens", "many", "-p", "default"), "'many' is not a whole"),
        (("tenants", "limits", "set", "dollars", "x", "-p", "default"), "12.50"),
        (("tenants", "limits", "set", "dollars", "1e10", "-p", "default"), "at most 9,223,372,036"),
        (("tenants", "limits", "set", "tokens", "5"), "give exactly one of --organisation"),
        (("tenants", "prices", "set", "x", "--input", "0.0001", "--output", "1"), "too fine"),
        (
            ("tenants", "prices", "set", "x", "--input", "1e999999", "--output", "1"),
            "not an amount",
        ),
        (("tenants", "prices", "set", "x", "--input", "1e9", "--output", "1"), "at most 1,000,000"),
        (("usage", "--since", "99999999999999999999d"), "within the years"),
        (("usage", "--since", "yesterday"), "'yesterday' is not a date or time"),
        (("usage", "--by", "tier", "--csv", "-"), "not by 'tier'"),
        (("usage", "--json", "--csv", "-"), "give one of --json and --csv"),
        (("usage", "--csv", "/absent/rows.csv"), "cannot write"),
        (("audit", "--limit", "99999999999999999999"), "to 1000000"),
        (("audit", "verify", "--organisation", "1"), "only the whole log can be verified"),
        (("audit", "verify", "--subject", "1"), "only the whole log can be verified"),
        (("audit", "verify", "--limit", "1"), "only the whole log can be verified"),
        (("explain", "\udcff", "--url", "http://127.0.0.1:1"), "no gateway answers"),
    ],
)
def test_error_is_one_sentence(store: Store, command: tuple[str, ...], message: str) -> None:
    home = store.accounts.create_organisation("default", actor="test").id
    default = store.accounts.create_project(home, "default", actor="test").id
    store.accounts.create_key(default, "app", actor="test")
    store.accounts.create_project(home, "web", actor="test")
    store.accounts.create_user(home, "ann@acme.test", actor="test")
    assert message in run_rejected(*command)


# --- output --------------------------------------------------------------------------------------


def test_usage_is_reported_by_name_and_exported(store: Store, tmp_path: Path) -> None:
    key = run_json("keys", "create", "app")
    row = recent_row(
        "r1",
        organisation=store.accounts.get_project(key["project"]).organisation,
        project=key["project"],
        key=key["id"],
        model="big",
        asked="default",
        route="beta",
        input_tokens=1000,
        output_tokens=234,
        nano_dollars=1_500_000,
    )
    store.ledger.add_records([row])
    table = run("usage", "--by", "project,key", "--since", "1d", "--key", "app")
    for cell in ("default", f"app ({key['prefix']}-...)", "$0.0015"):
        assert cell in table
    (total,) = run_json("usage", "--by", "", "--project", "default", "--organisation", "default")
    assert total["output_tokens"] == 234
    assert "There is no usage." in run("usage", "--until", "30d")
    assert run("usage", "--by", "model,model").count("Model") == 1
    words = run("usage", "--by", "asked,route,replica").split()
    assert {"Asked", "Route", "Replica", "default", "beta", "r1"} <= set(words)
    for option, name in (("--asked", "default"), ("--route", "beta"), ("--replica", "r1")):
        assert run_json("usage", "--by", "", option, name) == [total]
        assert run_json("usage", "--by", "model", option, "big") == []
    assert run("usage", "--csv", "-").splitlines()[1].startswith("r1,")
    run("usage", "--csv", str(tmp_path / "rows.csv"))
    assert (tmp_path / "rows.csv").read_text() == run("usage", "--csv", "-")
    assert run("usage", "--by", "model, key, model", "--csv", "-").splitlines() == [
        "model,key,requests,input_tokens,cached_tokens,output_tokens,nano_dollars",
        f"big,{key['id']},1,1000,0,234,1500000",
    ]
    assert len(run("usage", "export", "--version", "1.3", "--project", "default").splitlines()) == 3


@pytest.mark.parametrize("is_terminal", [True, False])
def test_long_cells_are_shown_in_full(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool
) -> None:
    """Ids stay complete so that a user can copy them, also beside names wider than the terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1" if is_terminal else "")
    monkeypatch.setenv("COLUMNS", "80")
    name = "long" * 50
    key = run_json("keys", "create", name)
    run("tenants", "prices", "set", name, "--input", "123456.789", "--output", "0.001")
    owner = {"project": key["project"], "key": key["id"], "model": name}
    counts = {"input_tokens": 1_234_567, "nano_dollars": 12_345_678_901_234}
    store.ledger.add_records([recent_row("r1", **owner, **counts)])
    usage, prices = run("usage", "--by", "key,model"), run("tenants", "prices", "list")
    for cell in (name, "1,234,567", "$12,345.678901234"):
        assert cell in usage
    for cell in (name, "$123,456.789"):
        assert cell in prices
    keys = run("keys", "list")
    assert {key["id"], f"{key['prefix']}-..."} <= set(keys.split())
    assert ("┃" in keys) is not is_terminal, "a narrow terminal gets a list instead of a table"


def test_audit_log_is_verified_and_shows_dollars_and_times(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("keys", "create", "app", "--expires", "2050-01-01T00:00Z")
    assert [entry["action"] for entry in run_json("audit", "--limit", "1")] == ["key.create"]
    run("tenants", "organisations", "create", "acme")
    (created,) = run_json("audit", "--organisation", "acme")
    assert created["action"] == "organisation.create"
    assert "All 4 entries" in run("audit", "verify")
    assert run_json("audit", "verify")["broken"] is None
    limit = ("tenants", "limits", "set", "dollars", "12.50", "--per", "day", "--key", "app")
    run(*limit)
    run(*limit[:4], "13", *limit[5:])
    run("tenants", "prices", "set", "big", "--input", "0.15", "--output", "0.6")
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        audit = run("audit")
    time.tzset()
    for part in (
        "key.create",
        "expires_at 2050-01-01 05:30+05:30",
        "amount $12.50",
        "amount $12.50 -> $13.00",
        "unit dollars",
        "input $0.15",
        "output $0.60",
    ):
        assert part in audit, part
    assert "nano" not in audit
    assert created["subject"] not in audit, "names instead of ids"
    assert not re.search(r"\d{9,}", audit), "no nano-dollars or epoch seconds"
    details = [entry["details"] for entry in run_json("audit")]
    assert {"amount": [12_500_000_000, 13_000_000_000]} in details


def test_markup_and_control_characters_are_not_interpreted(store: Store) -> None:
    run("tenants", "create", "[bold]:fire: x")
    assert "[bold]:fire: x" in run("tenants", "list")
    store.ledger.add_records([recent_row("r", user="\x1b[2Jann")])
    assert "\ufffd[2Jann" in run("usage", "--by", "user")


def test_characters_outside_the_terminals_encoding_are_replaced(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("keys", "create", "clé")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["argosy", "keys", "list"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # restored after `main`, which replaces it
    with pytest.raises(SystemExit) as exited:
        main()
    sys.stdout.flush()
    assert exited.value.code == 0
    assert b"cl?" in written.getvalue()
