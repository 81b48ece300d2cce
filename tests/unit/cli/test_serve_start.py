"""Authentication and printed commands of `argosy serve`: whether a key is required, and how to call the server."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path

import openai
import pytest
from tests.support.certificates import Authority

from argosy.cli.auth_bootstrap import AuthBootstrap, AuthModeName, AuthSetup
from argosy.cli.startup_display import StartupDisplay, api_url
from argosy.http_server import TlsConfig
from argosy.store import open_store

LOCALHOST, ALL_INTERFACES = "127.0.0.1", "0.0.0.0"  # noqa: S104 - no server listens
URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("mode", "host", "required_before", "required_after"),
    [
        ("auto", LOCALHOST, False, True),
        ("auto", ALL_INTERFACES, True, True),
        ("required", LOCALHOST, True, True),
        ("disabled", LOCALHOST, False, False),
        ("disabled", ALL_INTERFACES, False, False),
    ],
)
def test_key_requirement_before_and_after_the_first_key(
    tmp_path: Path, mode: AuthModeName, host: str, *, required_before: bool, required_after: bool
) -> None:
    url = f"sqlite:///{tmp_path}/argosy.db"
    bootstrap = AuthBootstrap(url, mode, host)
    setup = bootstrap.prepare_store()
    assert setup.key_required == (setup.first_key is not None) == required_before
    with contextlib.closing(open_store(url)) as store:
        organisation = store.accounts.create_organisation("acme", actor="test")
        project = store.accounts.create_project(organisation.id, "web", actor="test")
        store.accounts.create_key(project.id, "first", actor="test")
    assert bootstrap.prepare_store() == AuthSetup(None, required_after)


def print_commands(
    capsys: pytest.CaptureFixture[str],
    url: str,
    *,
    key_required: bool = False,
    tls: TlsConfig | None = None,
) -> str:
    """Return the commands that are shown when the server is ready."""
    StartupDisplay().show_ready(url, "it's", key_required=key_required, tls=tls)
    return capsys.readouterr().err


def curl_arguments(printed: str) -> list[str]:
    """Return the arguments of the printed curl command, as a shell splits them."""
    return shlex.split(printed.partition("curl:")[2].partition("}]}")[0] + "}]}'")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        (URL, URL),
        ("http://0.0.0.0:9000", "http://127.0.0.1:9000"),
        ("http://[::]:9000", "http://[::1]:9000"),
        ("http://10.1.2.3:80", "http://10.1.2.3:80"),
    ],
)
def test_printed_addresses_accept_connections(
    capsys: pytest.CaptureFixture[str], url: str, address: str
) -> None:
    printed = print_commands(capsys, url)
    assert f"{address}/v1/chat/completions" in curl_arguments(printed)
    assert f'base_url="{address}/v1", api_key="none"' in printed
    assert ALL_INTERFACES not in printed
    assert api_url(url, None) == f"{address}/v1"


def test_printed_curl_arguments_survive_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = curl_arguments(print_commands(capsys, URL, key_required=True))
    assert json.loads(arguments[arguments.index("-d") + 1])["model"] == "it's"
    assert "authorization: Bearer $ARGOSY_API_KEY" in arguments


def test_printed_python_code_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARGOSY_API_KEY", "sk-1")
    printed = print_commands(capsys, "http://0.0.0.0:9000", key_required=True)
    (code,) = re.findall(r"OpenAI SDK: +(.*)", printed)
    scope: dict[str, openai.OpenAI] = {}
    exec(code, scope)  # noqa: S102 - users paste this code
    client = scope["client"]
    assert (str(client.base_url), client.api_key) == ("http://127.0.0.1:9000/v1/", "sk-1")


def test_printed_commands_use_a_name_of_the_certificate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    authority, url = Authority(tmp_path), "https://0.0.0.0:9000"
    pair = authority.pair("server", "api.example.com")
    server_tls = TlsConfig(certificate=pair.certificate, key=pair.key)
    printed = print_commands(capsys, url, tls=server_tls)
    assert "https://api.example.com:9000/v1/chat/completions" in curl_arguments(printed)
    assert "--url https://api.example.com:9000" in printed
    mutual_tls = TlsConfig(certificate=pair.certificate, key=pair.key, client_ca=authority.ca)
    printed = print_commands(capsys, url, tls=mutual_tls)
    assert "--cert" in curl_arguments(printed)
    assert " chat " not in printed, "`argosy chat` has no client certificate"


def test_printed_commands_use_the_path_of_argosy_outside_path(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "argosy"
    program.touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [".venv/bin/argosy", "serve"])
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("ARGOSY_URL", raising=False)
    printed = print_commands(capsys, URL, key_required=True)
    assert "         .venv/bin/argosy chat\n" in printed
    assert 'ARGOSY_API_KEY="$(.venv/bin/argosy keys create)"' in printed
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "         argosy chat\n" in print_commands(capsys, URL)
