"""The README's examples run."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from tests.support.python_blocks import run_python_blocks
from tests.support.serve_process import ARGOSY, URL, ServeProcess
from typer.testing import CliRunner

from argosy.cli.app import app

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
YAML = [code for language, code in BLOCKS if language == "yaml"]
ACCOUNT_COMMANDS = [code for language, code in BLOCKS if language == "sh" and "keys create" in code]
CURL = [code for language, code in BLOCKS if language == "sh" and code.startswith("curl")]


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_examples(server: ServeProcess) -> None:
    blocks = [code.replace("http://127.0.0.1:8000", server.url) for code in PYTHON]
    for printed in run_python_blocks(blocks):
        assert len(printed.split()) > 3


@pytest.mark.parametrize("code", CURL, ids=range(len(CURL)))
def test_curl_example(code: str, server: ServeProcess) -> None:
    output = run(["sh", "-c", code.replace("http://127.0.0.1:8000", server.url)])
    assert output.count("data: {") > 3
    assert output.endswith("data: [DONE]\n\n")


@contextmanager
def run_command(*arguments: str) -> Iterator[str]:
    """Run an `argosy` command and yield its URL once it is ready. Check that SIGTERM ends it with 0."""
    with subprocess.Popen([ARGOSY, *arguments], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            ready = next(line for line in process.stderr if re.search(r"\bready\b", line))
            found = URL.search(ready)
            assert found is not None
            yield found.group()
        finally:
            process.terminate()
        process.stderr.read()
        assert process.wait() == 0


def test_gateway_example(tmp_path: Path) -> None:
    """Run `argosy gateway` with the example's file while its second replica does not exist."""
    (example,) = YAML
    small = ("--threads", "1", "--kv-memory", "64MiB")
    with run_command("replica", "--port", "0", *small) as replica:
        config = re.sub(r"http://127\.0\.0\.1:800\d", replica, example, count=1)
        (tmp_path / "fleet.yaml").write_text(config)
        with (
            run_command("gateway", "--config", str(tmp_path / "fleet.yaml"), "--port", "0") as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
        ):
            reply = client.completions.create(model="argosy-mini", prompt="The", max_tokens=5)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5


def test_accounts_example(tmp_path: Path) -> None:
    """Run the account commands in order, on one store."""
    (example,) = ACCOUNT_COMMANDS
    store = {"ARGOSY_STORE": f"sqlite:///{tmp_path / 'argosy.db'}"}
    for line in (*example.splitlines(), "argosy tenants list"):
        words = shlex.split(line, comments=True)
        result = CliRunner().invoke(app, words[1:], env=store)
        assert result.exit_code == 0, result.output
        assert words[1] != "keys" or result.stdout.startswith("sk-argosy-")
    assert "acme" in result.stdout


def test_readme_has_examples() -> None:
    assert len(PYTHON) >= 2
    assert CURL
