"""Commands that need no server: messages about missing parts, signals, and `argosy models`."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests.support.waiting import until
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.cli.quantities import format_count, format_size
from argosy.extras import install_command
from argosy.models import BUNDLED_MODEL

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("argosy 0.")


@pytest.mark.parametrize("command", ["version", "--help"])
def test_full_disk_is_one_error_line(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "argosy.cli", command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left on device" in done.stderr


LOGS = """import structlog, argosy.telemetry as telemetry
telemetry.configure_logging("console")
structlog.get_logger("argosy").warning("wrong")
"""


@pytest.mark.parametrize(
    "command", [("-m", "argosy.cli", "explain", "x", "--url", "x"), ("-c", LOGS)]
)
@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_disables_colours_on_terminal(command: tuple[str, ...], no_color: str) -> None:
    controller_fd, terminal_fd = os.openpty()
    with os.fdopen(controller_fd, "rb", 0) as terminal:
        environment = {**os.environ, "NO_COLOR": no_color}
        subprocess.run([sys.executable, *command], stderr=terminal_fd, env=environment, check=False)
        os.close(terminal_fd)
        output = terminal.read(4096)
    assert output.strip()
    assert (b"\x1b[" in output) is not bool(no_color)


def test_import_of_argosy_loads_no_heavy_package() -> None:
    code = "import sys, argosy, argosy.cli; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    for heavy in ("torch", "typer", "rich", "msgspec", "zmq", "numpy", "huggingface_hub"):
        assert f"'{heavy}'" not in loaded


@pytest.mark.parametrize("loaded", ["typer", "msgspec"])
def test_sigint_during_imports_ends_silently(loaded: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "argosy.cli", "serve"]
    with subprocess.Popen(
        command, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rpartition("|")[2].strip() == loaded:
                break
        process.send_signal(signal.SIGINT)
        try:
            lines = process.communicate(timeout=60)[1].splitlines()
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert all(line.startswith("import time:") for line in lines)


NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


async def test_sigterm_ends_process_one_before_a_server_handles_it() -> None:
    probe = await asyncio.create_subprocess_exec(*NAMESPACE, "true")
    if await probe.wait():
        pytest.skip("no permission for a process namespace (unshare --user --pid)")
    # The command waits for its standard input, and handles no signals itself.
    process = await asyncio.create_subprocess_exec(
        *(*NAMESPACE, sys.executable, "-m", "argosy.cli", "embed"), stdin=asyncio.subprocess.PIPE
    )

    def ends_after_sigterm() -> bool:
        if process.returncode is not None:
            return True
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            for child in children.split():
                os.kill(int(child), signal.SIGTERM)
        return False

    try:
        await until(ends_after_sigterm)
        assert process.returncode == 128 + signal.SIGTERM
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


@pytest.mark.parametrize("command", ["serve", "replica"])
def test_missing_model_is_one_error_line(command: str) -> None:
    result = runner.invoke(app, [command, "/no/such/model", "--port", "0"])
    assert result.exit_code == 2
    assert "there is no directory /no/such/model" in result.output
    assert result.output.count("\n") <= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--uds", "/" + 200 * "x"), "path too long"),
        (("serve", "--threads", "99999"), "'--threads'"),
        (("replica", "--options", '{"threads": 99999}'), "a whole number <= 1024 - at `$.threads`"),
        (("replica", "--options", "[]"), "write a JSON object of options by name"),
        (("models", "inspect", "--memory", "lots"), "write it like 8GiB"),
        (("serve", "--port", "0", "--max-model-len", "1000000"), "1000000 exceeds the model's"),
        (("chat", "--url", "http://127.0.0.1:9", "Hello"), "argosy serve"),
    ],
)
def test_invalid_option_is_named(arguments: tuple[str, ...], message: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


WRONG_FLEET = """\
models:
  - {name: chat, sorce: argosy-mini}
  - {name: b, source: x, hedge_after_s: -1, api_key: sk-abcdefghijklmnopqrstu}
pools:
  - name: p
    model: chta
    replicas: many
    min_replicas: 1
    optoins: {max_seqs: 1}
  - {name: p, model: b, options: {max_num_seqs: x, revision: main}}
  - name: q
    model: b
    engine: vlm
    memory: 1MiB
    max_surge: 0
    max_unavailable: 0
log_level: loud
"""
"""Misspelt names, wrong types and contradictions. That `max_replicas` is missing may be due to `replicas`."""
ITS_ERRORS = """\
2: models[0].sorce: Object contains unknown field `sorce`; did you mean `source`?
3: models[1].hedge_after_s: Expected a number > 0.0, but it is -1
3: models[1].api_key: Object contains unknown field `api_key`
6: pools[0].model: no model has the name 'chta'. Did you mean 'chat'?
7: pools[0].replicas: Expected a whole number or null, but it is 'many'
9: pools[0].optoins: Object contains unknown field `optoins`; did you mean `options`?
10: pools[1].name: the pool 'p' is defined twice. Keep one.
10: pools[1].options.revision: the fleet sets this option itself. Use models[].revision instead.
10: pools[1].options.max_num_seqs: Object contains unknown field `max_num_seqs`; did you mean `max_seqs`?
10: pools[1].options.max_num_seqs: Expected a whole number, but it is 'x'
13: pools[2].engine: no engine has the name 'vlm'. Did you mean 'vllm'?
14: pools[2].memory: '1MiB' is less than any engine needs. Give it at least 128MiB.
15: pools[2].max_surge: with max_unavailable 0 no replica could be replaced. Set one to 1.
17: log_level: Invalid enum value 'loud'; write debug, error, info or warning
"""
FLEET = "models: [{name: m, source: x}]\npools: [{name: p, model: m, environment: {A: {env: X}}}]\n"
GATEWAY = "models: [{name: m, replicas: [{url: 'http://a', api_key_env: X}]}]\n"
MISSPELT = """\
port: 1
modles:
  - {name: m, source: x}
  - {name: m, sorce: 3}
pools:
  - {name: p, model: m,
     environment: {A-B: x}}
"""
TWICE = "models:\n- {name: m, replicas: [{url: 'http://a'}]}\n- {name: m, replicas: [{url: 'http://a'}]}\n"


@pytest.mark.parametrize(
    ("texts", "status", "lines"),
    [
        ([WRONG_FLEET], 1, ITS_ERRORS),
        ([FLEET], 0, "2: pools[0].environment.A.env: warning: the environment variable X is not set here.\n"),
        ([FLEET, "pools: [{name: p, environment: null}]"], 0, ""),
        ([GATEWAY], 0, "1: models[0].replicas[0].api_key_env: warning: the environment variable X is not set here.\n"),
        ([TWICE + "routes: [{target_model: x}]"], 1,
            ("3: models[1].name: model name 'm' is defined twice. Keep one.\n"
            "4: routes[0]: route 'routes[0]': target_model: no model has the name 'x'. Use one of m, m.\n")),
        (["models: [{}, {name: 1, url: x}]\nprt: 1"], 1,
            ("1: models[0]: Object missing required field `name`\n"
            "1: models[1].name: Expected text, but it is 1\n"
            "1: models[1].url: Object contains unknown field `url`\n"
            "2: prt: Object contains unknown field `prt`; did you mean `port`?\n")),
        (["models: [\n}"], 1, "2: did not find expected node content\n"),
        (["port: 1\nport: 2"], 1, "2: 'port' is defined twice, in line 1 and in line 2. Keep one.\n"),
        (["port: !!int x"], 1, "1: 'x' is not a valid int\n"),
        (["[1]"], 1, "1: Expected a mapping, got a list\n"),
        (["\0"], 1, "1: unacceptable character #x0000: control characters are not allowed\n"),
        ([MISSPELT], 1,
            ("3: modles: Object contains unknown field `modles`; did you mean `models`?\n"
            "4: modles[1].sorce: Object contains unknown field `sorce`; did you mean `source`?\n"
            "4: modles[1].sorce: Expected text or null, but it is 3\n"
            "4: modles[1].name: model name 'm' is defined twice. Keep one.\n"
            "7: pools[0].environment: Expected text such as MY_VARIABLE as key\n")),
        ([FLEET.replace("A: {env: X}", "A_env: x")], 0, ""),
        ([FLEET, "pools: [{name: p, launcher: kubernetes, image: i}]\nkubernetes: {secret_name: s}"], 0, ""),
    ],
)  # fmt: skip
def test_validate_shows_all_errors_with_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str], status: int, lines: str
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"{number}.yaml" for number in range(len(texts))]
    for name, text in zip(names, texts, strict=True):
        Path(name).write_text(text)
    result = runner.invoke(app, ["validate", *names])
    assert (result.exit_code, result.stdout.replace("0.yaml:", "")) == (status, lines)


def test_validate_reads_standard_input_and_refuses_missing_files() -> None:
    command = [sys.executable, "-m", "argosy.cli", "validate", "-"]
    done = subprocess.run(command, input="prt: 1", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("\n")) == (1, 2)
    assert runner.invoke(app, ["validate", "/no/such/file"]).exit_code == 2


def test_missing_torch_names_engine_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = runner.invoke(app, ["serve"])
    assert result.exit_code == 2
    assert install_command("engine") in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "http://127.0.0.1:9"), "no gateway answers"),
        (("--url", "127.0.0.1:8000"), "write it like http://"),
        (("--url", "localhost:8000"), "write it like http://"),
        (("--url", "http://"), "write it like http://"),
        (("--api-key", "a\nb"), "the API key contains characters"),
        (("--api-key", "kľúč"), "the API key contains characters"),
    ],
)
def test_explain_with_invalid_option_is_one_error_line(
    arguments: tuple[str, ...], message: str
) -> None:
    result = runner.invoke(app, ["explain", "some-id", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "some-id" not in result.output


@contextlib.contextmanager
def answer_once(status: int, body: bytes) -> Iterator[tuple[str, list[str]]]:
    """Run a server that answers one request. Yields its URL and the paths of requests."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", paths
        thread.join()


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b'{"id": 1}'])
def test_explain_reports_server_that_is_no_gateway(answer: bytes) -> None:
    with answer_once(200, answer) as (url, paths):
        result = runner.invoke(app, ["explain", "a/../b?c#d", "--url", url])
    assert paths == ["/admin/requests/a%2F..%2Fb%3Fc%23d"]
    assert (result.exit_code, "is not an Argosy gateway" in result.output) == (2, True)


@pytest.mark.parametrize("rejected", [False, True])
def test_chat_removes_terminal_control_characters(rejected: bool) -> None:
    message = "\x1b]0;mine\x07\x9b2J\r\tWell, \U0001f469\u200d\U0001f680\n"
    answer = json.dumps({"choices": [{"delta": {"content": message}}]})
    error = json.dumps({"error": {"message": message}})
    response = error if rejected else f"data: {answer}\n\ndata: [DONE]\n\n"
    with answer_once(400 if rejected else 200, response.encode()) as (url, _):
        result = runner.invoke(app, ["chat", "Hi", "--url", url, "--model", "m"], color=True)
    assert "]0;mine" in result.output
    # The command itself prints errors in red.
    shown = result.output.replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(shown)
    assert "]0;mine2J\tWell, \U0001f469\u200d\U0001f680\n" in shown
    if not rejected:
        assert result.stdout == "]0;mine2J\tWell, \U0001f469\u200d\U0001f680\n\n"


@pytest.mark.parametrize("command", ["chat", "embed"])
@pytest.mark.parametrize(
    "answer", [b'data: {"choices": [{"delta": null}]}\n\n', b"data: {\n\n", b"{}", b'{"data": 1}']
)
def test_server_with_another_api_is_reported(command: str, answer: bytes) -> None:
    with answer_once(200, answer) as (url, _):
        result = runner.invoke(app, [command, "Hi", "--url", url, "--model", "m"])
    assert result.exit_code == 2
    is_cut = command == "chat" and not answer.startswith(b"data")
    assert ("ended the answer early" if is_cut else "check --url") in result.stderr


def test_models_inspects_bundled_model() -> None:
    table = runner.invoke(app, ["models"])
    assert table.exit_code == 0
    assert "LlamaForCausalLM" in table.output
    assert "several at the start" in table.output
    result = runner.invoke(app, ["models", "inspect", str(BUNDLED_MODEL), "--output", "json"])
    fit = json.loads(result.stdout)
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    assert fit["vocab_size"] == config["vocab_size"]
    assert fit["kv_bytes_per_token"] == (
        2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2
    )
    assert fit["weight_bytes"] == 2 * fit["parameters"]
    assert fit["chat_template_takes"]["tools"]["arguments"] == "object"


def test_models_plans_for_given_memory() -> None:
    arguments = ["models", "inspect", "--output", "json", "--memory"]
    small = json.loads(runner.invoke(app, [*arguments, "1GiB"]).stdout)
    large = json.loads(runner.invoke(app, [*arguments, "64GiB"]).stdout)
    none = json.loads(runner.invoke(app, [*arguments, "1MB"]).stdout)
    assert (small["free_bytes"], none["free_bytes"]) == (2**30, 10**6)
    assert small["kv_tokens"] * small["kv_bytes_per_token"] <= 2**30 - small["weight_bytes"]
    assert large["kv_tokens"] > 60 * small["kv_tokens"]
    assert (none["kv_tokens"], none["full_sequences"]) == (0, 0)


def test_sizes_and_counts_are_formatted() -> None:
    assert [format_size(n) for n in (512, 4096, 3 * 2**30)] == ["512 B", "4 KiB", "3 GiB"]
    assert [format_count(n) for n in (12, 8_130_000, 7e9)] == ["12", "8.13 M", "7 B"]
