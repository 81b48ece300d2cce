"""What `argosy serve` finds out of its store before it says how to talk to it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import openai
import pytest
from tests.integration.gateway.certificates import Authority

from argosy.cli.auth_bootstrap import AuthBootstrap, AuthModeName, AuthSetup
from argosy.cli.startup_display import StartupDisplay
from argosy.http_server import TlsConfig
from argosy.store import open_store

LOCAL, ANYWHERE = "127.0.0.1", "0.0.0.0"  # noqa: S104 - nothing listens


@pytest.mark.parametrize(
    ("auth", "host", "before", "after"),
    [
        ("auto", LOCAL, False, True),
        ("auto", ANYWHERE, True, True),
        ("required", LOCAL, True, True),
        ("disabled", LOCAL, False, False),
        ("disabled", ANYWHERE, False, False),
    ],
)
def test_callers_need_keys_once_there_are_some(
    tmp_path: Path, auth: AuthModeName, host: str, *, before: bool, after: bool
) -> None:
    url = f"sqlite:///{tmp_path}/argosy.db"
    door = AuthBootstrap(url, auth, host)
    opening = door.prepare_store()
    assert (opening.key_required, opening.first_key is not None) == (before, before)
    _make_key(url)
    assert door.prepare_store() == AuthSetup(None, after)


def _make_key(url: str) -> None:
    store = open_store(url)
    made = store.accounts.create_organisation("acme", actor="test")
    project = store.accounts.create_project(made.id, "web", actor="test")
    store.accounts.create_key(project.id, "first", actor="test")
    store.close()


@pytest.mark.parametrize(("keyed", "said"), [(True, "ARGOSY_API_KEY"), (False, '"none"')])
def test_the_panel_says_whether_it_takes_a_key(
    capsys: pytest.CaptureFixture[str], *, keyed: bool, said: str
) -> None:
    StartupDisplay().show_ready("http://127.0.0.1:8000", "m", key_required=keyed)
    assert said in capsys.readouterr().err


def _printed_commands(
    capsys: pytest.CaptureFixture[str], url: str, *, keyed: bool = False, tls: TlsConfig | None = None
) -> str:
    StartupDisplay().show_ready(url, "it's", key_required=keyed, tls=tls)
    return capsys.readouterr().err


def _curl_arguments(printed: str) -> list[str]:
    """The arguments of the printed curl command, as a shell splits them."""
    return shlex.split(printed.partition("curl:")[2].partition("}]}")[0] + "}]}'")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://0.0.0.0:9000", "http://127.0.0.1:9000"),
        ("http://[::]:9000", "http://[::1]:9000"),
        ("http://10.1.2.3:80", "http://10.1.2.3:80"),
    ],
)
def test_printed_addresses_can_be_connected_to(
    capsys: pytest.CaptureFixture[str], url: str, address: str
) -> None:
    printed = _printed_commands(capsys, url)
    assert f"{address}/v1/chat/completions" in _curl_arguments(printed)
    assert f'base_url="{address}/v1"' in printed
    assert "0.0.0.0" not in printed  # noqa: S104 - nothing listens


def test_printed_curl_arguments_survive_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = _curl_arguments(_printed_commands(capsys, "http://127.0.0.1:8000", keyed=True))
    assert json.loads(arguments[arguments.index("-d") + 1])["model"] == "it's"
    assert "authorization: Bearer $ARGOSY_API_KEY" in arguments


def test_printed_python_code_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARGOSY_API_KEY", "sk-1")
    printed = _printed_commands(capsys, "http://0.0.0.0:9000", keyed=True)
    (code,) = re.findall(r"OpenAI SDK: +(.*)", printed)
    scope: dict[str, openai.OpenAI] = {}
    exec(code, scope)  # noqa: S102 - what users paste
    assert (str(scope["client"].base_url), scope["client"].api_key) == (
        "http://127.0.0.1:9000/v1/",
        "sk-1",
    )


def test_printed_commands_use_a_name_of_the_certificate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    pair = authority.pair("server", "api.example.com")
    tls = TlsConfig(certificate=pair.certificate, key=pair.key)
    printed = _printed_commands(capsys, "https://0.0.0.0:9000", tls=tls)
    assert "https://api.example.com:9000/v1/chat/completions" in _curl_arguments(printed)
    assert "--url https://api.example.com:9000" in printed
    clients_identified = TlsConfig(
        certificate=pair.certificate, key=pair.key, client_ca=authority.ca
    )
    printed = _printed_commands(capsys, "https://0.0.0.0:9000", tls=clients_identified)
    assert "--cert" in _curl_arguments(printed)
    assert " chat " not in printed  # `argosy chat` has no client certificate


def test_commands_run_argosy_by_its_path_unless_it_is_on_path(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "argosy"
    program.touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [".venv/bin/argosy", "serve"])
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("ARGOSY_URL", raising=False)
    printed = _printed_commands(capsys, "http://127.0.0.1:8000", keyed=True)
    assert "         .venv/bin/argosy chat\n" in printed
    assert 'ARGOSY_API_KEY="$(.venv/bin/argosy keys create)"' in printed
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "         argosy chat\n" in _printed_commands(capsys, "http://127.0.0.1:8000")
