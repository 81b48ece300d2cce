"""README and tutorials work as written: every command runs, and prints what the page shows."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import openai
import pytest
from tests.support.minilm import minilm_path
from tests.support.python_blocks import run_python_blocks
from tests.support.state_processes import kill_processes
from typer.testing import CliRunner

from argosy.cli.app import app

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = DOCS / "tutorials"
IN_MANY_PROCESSES = {TUTORIALS / "first-fleet.md", TUTORIALS / "two-replicas-and-a-failover.md"}
PAGES = [
    *sorted({*TUTORIALS.glob("*.md")} - IN_MANY_PROCESSES),
    *(pytest.param(page, marks=pytest.mark.exhaustive) for page in sorted(IN_MANY_PROCESSES)),
    DOCS / "how-to/embeddings-and-rerank.md",
]
"""Pages whose commands are run. Tests of failover and of fleets hold what the exhaustive ones show."""
PORTS = ("8000", "8001", "8002")
FIRST_SERVER = "make serve\n"
"""Command of the server that most tutorials use."""
SMALL = "--threads 1 --kv-memory 64MiB"
LOOK = re.compile(
    r"ask|curl|tail|\.venv/bin/argosy (events|explain|replicas list|rollout status|status|usage)"
)
"""Start of a command that a reader repeats until it prints what the page shows."""
MAX_LOOKS = 600
LOOK_INTERVAL_S = 0.1
BUSY_REPLICA = """$(
    until grep -q '"text":"' interrupted.txt; do sleep 0.1; done
    curl -s http://127.0.0.1:8000/metrics | sed -n 's/.*replica_requests_in_flight.*replica="\\(.*\\)"} 1.0/\\1/p'
)"""
AS_SEEN = {
    "$(cat left.pid)": f'$(cat "{BUSY_REPLICA}.pid")',
    "kill $(cat right.pid)": "kill $(cat left.pid right.pid) 2> /dev/null || true",
    "pkill -9 -f chat-1-0.sock": "kill -9 $(pgrep -f first/replicas/chat-1-0.sock)",
}
"""Commands that depend on what a reader has seen, or could find processes of others, as a program does the same."""
END_OF_BLOCK = "end-of-block"
CHECKER = doctest.OutputChecker()


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    """`Server`, `Output`, the name of a file to write, or empty."""
    text: str


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text()
    pattern = r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$'
    found = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    return [Block(*parts) for parts in found]


README = read_blocks(DOCS.parent / "README.md")
PAGES_OF_PYTHON = [TUTORIALS / page for page in ("first-server.md", "agents.md", "offline.md")]
PYTHON = [
    block
    for blocks in (README, *map(read_blocks, PAGES_OF_PYTHON))
    for block in blocks
    if block.language == "python"
]


@dataclass
class Terminal:
    """A shell that keeps its variables and functions from block to block."""

    process: subprocess.Popen[str]

    def run(self, commands: str) -> tuple[str, str]:
        """Run the commands of a block and return what they print, and the status of the last one."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{commands}\necho {END_OF_BLOCK} $?\n")
        self.process.stdin.flush()
        printed = []
        for line in self.process.stdout:
            before, marker, status = line.partition(END_OF_BLOCK)
            printed.append(before)
            if marker:
                return "".join(printed), status.strip()
        pytest.fail(f"the shell ended: {''.join(printed)}")


def free_ports() -> dict[str, str]:
    """Return a free port for each port of the tutorials."""
    with ExitStack() as sockets:
        opened = [sockets.enter_context(socket.socket()) for _ in PORTS]
        for one in opened:
            one.bind(("127.0.0.1", 0))
        return {port: str(one.getsockname()[1]) for port, one in zip(PORTS, opened, strict=True)}


@contextmanager
def serving(command: str, terminal_environment: dict[str, str], folder: Path) -> Iterator[None]:
    """Run a server in a terminal of its own until the tutorial ends, and stop it with Ctrl-C."""
    with subprocess.Popen(
        command.split(), cwd=folder, env=terminal_environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            shown = ""
            for line in process.stderr:
                shown += line
                if "is ready at" in line or '"event":"ready"' in line:
                    break
            else:
                pytest.fail(f"the server ended: {shown}")
            yield
        finally:
            process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait() == 0


class TutorialEnvironment:
    """Environment of the terminals of a page, with free ports instead of those of the page."""

    def __init__(self, state: Path) -> None:
        self.ports = free_ports()
        self.url = f"http://127.0.0.1:{self.ports['8000']}"
        self.variables = os.environ | {
            "XDG_STATE_HOME": str(state),
            "ARGOSY_URL": self.url,
            "COLUMNS": "200",
        }

    def adapt(self, text: str) -> str:
        """Use free ports, and servers that are small."""
        for command, replacement in AS_SEEN.items():
            text = text.replace(command, replacement)
        text = text.replace("make serve", ".venv/bin/argosy serve --port 8000")
        text = text.replace("sentence-transformers/all-MiniLM-L6-v2", str(minilm_path()))
        text = re.sub(r"argosy (serve|replica) ", rf"argosy \1 {SMALL} ", text)
        text = text.replace("--config fleet.yaml\n", "--config fleet.yaml --port 8000\n")
        return re.sub(
            r"(127\.0\.0\.1:|--port |port: )(\d{4})\b",
            lambda found: found[1] + self.ports[found[2]],
            text,
        )


@contextmanager
def tutorial_environment() -> Iterator[TutorialEnvironment]:
    """Create an environment, and end the processes that are left in it."""
    state = Path(tempfile.mkdtemp(prefix="argosy-state-"))  # short enough for the names of sockets
    try:
        yield TutorialEnvironment(state)
    finally:
        kill_processes(state)
        shutil.rmtree(state)


def link_programs(folder: Path) -> None:
    """Make the installed programs those of a virtual environment in `folder`."""
    (folder / ".venv").mkdir()
    (folder / ".venv/bin").symlink_to(Path(sys.executable).parent)


@pytest.fixture(scope="module")
def first_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TutorialEnvironment]:
    """Run the server that most tutorials start. The last of them, on tenants, makes keys necessary."""
    folder = tmp_path_factory.mktemp("first-server")
    link_programs(folder)
    with (
        tutorial_environment() as environment,
        serving(environment.adapt(FIRST_SERVER), environment.variables, folder),
    ):
        yield environment


def test_python_prints_answers(first_server: TutorialEnvironment) -> None:
    for printed in run_python_blocks([first_server.adapt(block.text) for block in PYTHON]):
        assert printed.strip()


def test_readme_streams_with_curl(first_server: TutorialEnvironment) -> None:
    (code,) = [block.text for block in README if block.text.startswith("curl")]
    command = ["sh", "-c", first_server.adapt(code)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.count("data: {") > 3
    assert output.endswith("data: [DONE]\n\n")


def test_readme_gateway_example(tmp_path: Path) -> None:
    """Run `argosy gateway` with the example's file while its second replica does not exist."""
    (example,) = [block.text for block in README if block.language == "yaml"]
    link_programs(tmp_path)
    with tutorial_environment() as environment, ExitStack() as running:
        (tmp_path / "fleet.yaml").write_text(environment.adapt(example))
        for command in ("replica --port 8001", "gateway --config fleet.yaml\n"):
            adapted = environment.adapt(f".venv/bin/argosy {command}")
            running.enter_context(serving(adapted, environment.variables, tmp_path))
        url = f"{environment.url}/v1"
        client = running.enter_context(openai.OpenAI(base_url=url, api_key="none"))
        reply = client.completions.create(model="argosy-mini", prompt="The", max_tokens=5)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5


def test_readme_account_commands(tmp_path: Path) -> None:
    """Run the account commands in order, on one store."""
    (example,) = [block.text for block in README if "keys create" in block.text]
    store = {"ARGOSY_STORE": f"sqlite:///{tmp_path / 'argosy.db'}"}
    for line in (*example.splitlines(), "argosy tenants list"):
        words = shlex.split(line, comments=True)
        result = CliRunner().invoke(app, words[1:], env=store)
        assert result.exit_code == 0, result.output
        assert words[1] != "keys" or result.stdout.startswith("sk-argosy-")
    assert "acme" in result.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tutorial_commands_print_the_shown_output(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    blocks = read_blocks(page)
    link_programs(tmp_path)
    with ExitStack() as running:
        environment: TutorialEnvironment = (
            request.getfixturevalue("first_server")
            if any(block.text == FIRST_SERVER for block in blocks)
            else running.enter_context(tutorial_environment())
        )
        shell = subprocess.Popen(
            ["bash"],
            cwd=tmp_path,
            env=environment.variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        running.enter_context(shell)
        running.callback(lambda: os.killpg(shell.pid, signal.SIGKILL))
        terminal = Terminal(shell)
        following = [*blocks[1:], Block("", "", "")]
        for (language, title, text), shown in zip(blocks, following, strict=True):
            adapted = environment.adapt(text)
            if title == "Server" and text != FIRST_SERVER:
                running.enter_context(serving(adapted, environment.variables, tmp_path))
            elif title.startswith("Change in "):
                change_line(tmp_path / title.removeprefix("Change in "), adapted)
            elif language in {"yaml", "json"}:
                (tmp_path / title).write_text(adapted)
            elif language == "sh" and title != "Server":
                expected = environment.adapt(shown.text) if shown.title == "Output" else None
                run_block(terminal, adapted, expected)


def change_line(file: Path, line: str) -> None:
    """Replace the line of a file with the same key."""
    key = line.partition(":")[0]
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line if old.startswith(f"{key}:") else old for old in lines))


def run_block(terminal: Terminal, commands: str, expected: str | None) -> None:
    """Run the commands of a block and check what they print. Commands that only look are repeated for a minute."""
    for _ in range(MAX_LOOKS if LOOK.match(commands) and expected is not None else 1):
        printed, status = terminal.run(commands)
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        is_shown = expected is None or CHECKER.check_output(
            expected.rstrip() + "...", printed + "\n.", flags
        )
        if status == "0" and is_shown:
            return
        time.sleep(LOOK_INTERVAL_S)
    assert status == "0", printed
    assert is_shown, printed
