"""README, tutorials and how-tos work as written: every command runs in the order of its page, and prints what it shows.

`NOT_RUN` lists the commands that do not run here. A new page or command runs without an entry anywhere.
"""

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

import openai
import pytest
from tests.support.minilm import minilm_path
from tests.support.pages import GUIDES, ROOT, SHELLS, Block, read_blocks, split_commands
from tests.support.python_blocks import run_python_blocks
from tests.support.services import find_program, running_postgres
from tests.support.state_processes import kill_processes
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.models import BUNDLED_MODEL

NO_CLUSTER = "needs a cluster, of which tests/integration/fleet has a double"
NO_NETWORK = "downloads packages, programs or models; tests/e2e/test_wheel.py installs the wheel"
NO_ENGINES = "is a program of other engines; tests/integration/gateway has its formats"
NO_CONTAINERS = "`make image-check` executes the steps of the Dockerfile and starts the results"
NO_AGENTS = "tests/integration/gateway replays the requests of the agents"
BY_ANOTHER_TEST = "needs a server; test_fleet_in_postgresql_is_restored runs it"
NOT_RUN = {
    "add-a-model-family.md": {
        ".venv/bin/pytest": "is the suite itself, and a tool that writes into the checkout",
        '"Olmo2ForCausalLM"': "is a row of a table of the source",
        '"olmo 2"': "is a row of a table of a test",
    },
    "add-vllm-or-sglang.md": {"vllm serve": NO_ENGINES},
    "back-up-and-restore.md": {
        "argosy store copy --store sqlite:////var/lib/argosy/argosy.db postgresql": "needs a server; "
        "tests/integration/store copies between both databases",
        "pg_dump": BY_ANOTHER_TEST,
        "createdb": BY_ANOTHER_TEST,
    },
    "batches.md": {
        "argosy batch": "takes ids of batches; tests/integration/dialects runs these commands",
    },
    "coding-agents.md": {
        "ARGOSY_API_KEY=sk-argosy-... codex": NO_AGENTS,
        "ARGOSY_API_KEY=sk-argosy-... opencode": NO_AGENTS,
        "export ANTHROPIC_BASE_URL": NO_AGENTS,
        "export OPENAI_BASE_URL": NO_AGENTS,
    },
    "containers.md": {"docker build": NO_CONTAINERS, "docker run": NO_CONTAINERS},
    "deploy-systemd.md": {"python3 -m venv": NO_NETWORK},
    "gpus.md": {"PYTHONPATH=src": "needs a GPU; tests/unit/test_benchmarks.py runs its driver"},
    "helm.md": {"helm install": "needs a cluster; tests/integration/deploy renders the chart"},
    "install.md": {
        "python3 -m venv": NO_NETWORK,
        "~/argosy-env/bin/pip": NO_NETWORK,
        ".venv/bin/pip": NO_NETWORK,
    },
    "kubernetes.md": {
        "kubectl": NO_CLUSTER,
        "argosy plan": NO_CLUSTER,
        "argosy up": NO_CLUSTER,
    },
    "keep-and-erase.md": {
        "argosy usage archive": "needs DuckDB; tests/integration/store/test_usage_archive.py moves rows",
    },
    "models.md": {"argosy models pull Qwen": NO_NETWORK},
    "quality.md": {
        "argosy quality run support --model chat-v2": "needs two models; tests/unit/cli/test_quality.py compares them",
    },
    "ray.md": {
        ".venv/bin/pip": NO_NETWORK,
        "ray start": "needs several machines; tests/integration/fleet starts a cluster on one",
        "argosy up": "needs that cluster",
        "argosy status": "needs that cluster",
    },
    "route-by-cost.md": {
        "argosy routing": "needs two models of one server and minutes; tests/unit/cli/test_routing.py runs them",
        "python -m benchmarks": "takes minutes",
    },
    "upgrade-and-roll-back.md": {
        "python3 -m venv": NO_NETWORK,
        "/opt/argosy-0.2.0/.venv/bin/argosy": "needs two versions, which tests/e2e/test_upgrade.py installs",
    },
    "twin.md": {
        "argosy twin replay": "needs requests in the ledger, as tests/unit/twin/test_twin.py has",
        "argosy twin run benchmarks/scenarios/chaos.yaml --seeds 1000": "takes minutes",
        "argosy twin run scenario.yaml --set faults=[]": "takes minutes",
        "argosy twin plan": "needs a fleet in the store, as tests/unit/twin/test_change_forecast.py has",
        "mkdir -p steps": "needs load, as tests/integration/test_twin_live.py sends",
        "argosy twin fit": "needs the log of an engine, as tests/unit/twin/test_twin.py has",
    },
}
"""Reason why the commands and programs of a page that begin like this are not run."""
EXHAUSTIVE = {
    "adapters.md",
    "add-a-model-family.md",
    "add-vllm-or-sglang.md",
    "back-up-and-restore.md",
    "capacity-questions.md",
    "declare-a-fleet.md",
    "first-fleet.md",
    "models.md",
    "quantize.md",
    "roll-out-a-version.md",
    "rotate-keys.md",
    "troubleshoot.md",
    "two-replicas-and-a-failover.md",
    "upgrade-and-roll-back.md",
}
"""Pages that start many processes or simulate much. Faster tests of the same subjects are in the default tier."""
NEED_A_SERVER = {
    "add-vllm-or-sglang.md",
    "files.md",
    "long-streams.md",
    "prefix-cache.md",
    "notices.md",
    "runbooks.md",
    "quality.md",
    "upgrade-and-roll-back.md",
}
"""Pages that begin with a server that runs."""
PORTS = ("8000", "8001", "8002")
FIRST_SERVER = "make serve\n"
"""Command of the server that most tutorials use."""
# A make that another make started would name the directory in its last line.
MAKE_SERVE = subprocess.check_output(
    ["make", "--no-print-directory", "-n", "serve"], cwd=ROOT, text=True
).splitlines()[-1]
MINILM = ".venv" / minilm_path().relative_to(sys.prefix)
SMALL = "--threads 1 --kv-memory 64MiB"
LOOK = re.compile(
    r"ask|curl|tail|(?:\.venv/bin/)?argosy (events|explain|replicas list|rollout status|status|usage)"
)
"""Start of a command that a reader repeats until it prints what the page shows."""
LOOK_TIMEOUT_S = 60.0
LOOK_INTERVAL_S = 0.1
BUSY_REPLICA = """$(
    timeout 60 sh -c 'until grep -q text interrupted.txt; do sleep 0.1; done'
    curl -s http://127.0.0.1:8000/metrics | sed -n 's/.*replica_requests_in_flight.*replica="\\(.*\\)"} 1.0/\\1/p'
)"""
ANY_ACCOUNTS = """argosy tenants create acme
argosy keys create web --project acme > /dev/null
"""
REQUEST = """curl -sf $ARGOSY_URL/v1/completions -H 'content-type: application/json' \\
  -H 'x-request-id: REQUEST_ID' -d '{"model": "argosy-mini", "prompt": "Hello", "max_tokens": 4}' > /dev/null
"""
QUESTIONS = r"""post() {
    curl -sf http://127.0.0.1:8000/v1/$1 -H "authorization: Bearer $(cat key.txt)" \
        -H 'content-type: application/json' "${@:2}"
}
wait_for() { for n in $(seq 300); do "$@" > /dev/null 2>&1 && return; sleep 0.2; done; "$@"; }
id_in() { grep -o '"id": *"[^"]*"' $1 | head -1 | cut -d'"' -f4; }
answers() {
    argosy status | grep serve
    for question in history audit "keys list" "tenants list" "tenants limits list" usage; do
        argosy $question --json
    done
    post responses/$(id_in response.json)
    post conversations/$(id_in conversation.json)/items
}
"""
"""Functions that ask a fleet what it knows."""
USED_FLEET = r"""cat > fleet.yaml << END
fleet: shop
port: 8000
store: {url: "$ARGOSY_STORE"}
models: [{name: chat, source: argosy-mini}]
pools: [{name: chat, model: chat, replicas: 1, options: {threads: 1, kv_memory: 64MiB}}]
END
mkdir -p /var/lib/argosy
argosy up
argosy tenants create acme
argosy tenants limits set requests 1000 --project acme
argosy keys create web --project acme > key.txt
wait_for post models
post chat/completions -d '{"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}'
post responses -d '{"model": "chat", "input": "Hi", "max_output_tokens": 4}' > response.json
post conversations -d '{"items": [{"type": "message", "role": "user", "content": "Hello"}]}' > conversation.json
argosy scale chat 2 --wait --reason "for the sale"
sed -i 's/replicas: 1, options: {/replicas: 2, options: {max_seqs: 6, /' fleet.yaml
argosy apply --yes --wait
argosy scale chat 1 --wait
wait_for eval "argosy usage | grep -q ' 2 '"
answers > before.txt
"""
"""Commands that declare a fleet, use it, scale it and change it."""
SAME_ANSWERS = r"""grep -q '1 of 1 replica serves' before.txt
grep -q 'for the sale' before.txt
grep -q '"text":"Hello"' before.txt
wait_for post models
answers | diff before.txt -
post chat/completions -d '{"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}'
wait_for eval "argosy usage | grep -q ' 3 '"
argosy down
"""
VIEWER = """argosy keys create ops -p acme --role viewer --scope gateway > ops
export ARGOSY_API_KEY=$(grep -o "sk-argosy-[^ ]*" ops)
"""
ANY_GATEWAY = """cat > gateway.yaml << END
{port: 8000, store: {}, models: [{name: llama, replicas: [{url: "http://127.0.0.1:8001"}]}]}
END
argosy gateway --config gateway.yaml 2> gateway.log &
timeout 60 sh -c 'until curl -sf http://127.0.0.1:8000/health; do sleep 0.1; done'
"""
BEFORE = {
    "add-vllm-or-sglang.md": f"""{REQUEST}
echo "{{port: 8001, models: [{{name: qwen, replicas: [{{url: '$ARGOSY_URL', model: argosy-mini}}]}}]}}" > gateway.yaml
argosy gateway --config gateway.yaml 2> gateway.log &
timeout 60 sh -c 'until curl -sf http://127.0.0.1:8001/ready; do sleep 0.1; done'
""",
    "back-up-and-restore.md": f"{QUESTIONS}export ARGOSY_STORE=sqlite:////var/lib/argosy/argosy.db\n{USED_FLEET}",
    "costs.md": f"{ANY_ACCOUNTS}{VIEWER}{ANY_GATEWAY}",
    "long-streams.md": REQUEST,
    "models.md": ANY_ACCOUNTS,
    "objectives.md": ANY_GATEWAY,
    "rotate-keys.md": ANY_ACCOUNTS,
    "troubleshoot.md": ANY_ACCOUNTS,
}
"""Commands that make what a page takes for granted."""
AFTER = {"back-up-and-restore.md": SAME_ANSWERS}
"""Commands that check what a page has brought about."""
AS_SEEN = {
    "$(cat left.pid)": f'$(cat "{BUSY_REPLICA}.pid")',
    "kill $(cat right.pid)": "kill $(cat left.pid right.pid) 2> /dev/null || true",
    "pkill -9 -f chat-1-0.sock": "kill -9 $(pgrep -f first/replicas/chat-1-0.sock)",
    "pgrep -f 'argosy gateway'": "pgrep -f 'argosy gateway --config gateway.yaml'",
    "~/.local/state/argosy": "$XDG_STATE_HOME/argosy",
    "path/to/model": str(BUNDLED_MODEL),
    "/data/qwen3-8b": str(BUNDLED_MODEL),
    "path/to/embedding-model": str(minilm_path()),
    "sentence-transformers/all-MiniLM-L6-v2": str(MINILM),
    "explain chatcmpl-...": "explain REQUEST_ID",
    "KEY_ID": "$(argosy keys list --all | grep -o 'key_[a-z0-9]*' | head -1)",
    "sudo -u argosy ": "env ",
    "/opt/argosy/.venv/bin/": "",
    "drain r0": "drain replica-1-0",
    "postgresql:///argosy": "sqlite:///$XDG_STATE_HOME/argosy/argosy.db",
    "argosy plan   ": """argosy up
sed -i 's/max_seqs: 16/max_seqs: 8/' fleet.yaml
argosy plan   """,
    "argosy rollout promote   ": "argosy rollout promote --force --reason tried   ",
    "options: {max_seqs: 16}": "options: {max_seqs: 16, kv_memory: 64MiB, threads: 1}",
}
"""Text that depends on a machine, on what a reader has seen, or could find processes of others."""
FOLDERS = re.compile(r"/(?:backup|var/lib)(?=/|\s)")
"""Folders of the machine, instead of which tests have folders of their own."""
END_OF_BLOCK = "end-of-block"
CHECKER = doctest.OutputChecker()


README = read_blocks(ROOT / "README.md")


def is_run(page: Path, code: str) -> bool:
    return not code.startswith(tuple(NOT_RUN.get(page.name, ())))


PYTHON = [
    block.text
    for page in (ROOT / "README.md", *GUIDES)
    for block in read_blocks(page)
    if block.language == "python" and is_run(page, block.text)
]
PAGES = [
    pytest.param(page, marks=[pytest.mark.exhaustive] * (page.name in EXHAUSTIVE), id=page.name)
    for page in GUIDES
    if any(
        is_run(page, command)
        for block in read_blocks(page)
        if block.language in SHELLS
        for command in split_commands(block)
    )
]


@dataclass
class Terminal:
    """A shell that keeps its variables and functions from block to block."""

    process: subprocess.Popen[str]

    def run(self, commands: str) -> tuple[str, str]:
        """Run the commands of a block. Return what they print, and the status of the last one that failed, or 0."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(
            f"FAILED=0\ntrap 'FAILED=$?' ERR\n{commands}\ntrap - ERR\necho {END_OF_BLOCK} $FAILED\n"
        )
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
def serving(command: str, terminal_environment: dict[str, str], folder: Path) -> Iterator[str]:
    """Run a server until the page ends, and stop it with Ctrl-C. Yields what it prints until it is ready."""
    ready = ["Press Ctrl-C"] if "argosy serve" in command else ["is ready at", '"event":"ready"']
    with subprocess.Popen(
        command.split(), cwd=folder, env=terminal_environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            shown = ""
            for line in process.stderr:
                shown += line
                if any(text in line for text in ready):
                    break
            else:
                pytest.fail(f"the server ended: {shown}")
            yield shown
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
            "XDG_DATA_HOME": str(state / "data"),
            "ARGOSY_URL": self.url,
            "COLUMNS": "200",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        for folder in ("backup", "var/lib"):
            (state / folder).mkdir(parents=True)
        self.state = state
        self.shown = ""
        """Text that the first server has printed."""

    def adapt(self, text: str) -> str:
        """Use free ports, folders of the test, and servers that are small."""
        for command, replacement in AS_SEEN.items():
            text = text.replace(command, replacement)
        text = FOLDERS.sub(lambda found: f"{self.state}{found[0]}", text)
        text = re.sub(r"^make serve$", MAKE_SERVE, text, flags=re.MULTILINE)
        text = re.sub(r"argosy (serve|replica) +", rf"argosy \1 {SMALL} ", text)
        text = re.sub(r"argosy serve (?!.*--port)", "argosy serve --port 8000 ", text)
        if re.search(r"^models:", text, re.MULTILINE) and not re.search(
            r"^port:", text, re.MULTILINE
        ):
            text = f"port: 8000\n{text}"
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
    (folder / ".venv").symlink_to(sys.prefix)


@pytest.fixture(scope="module")
def first_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TutorialEnvironment]:
    """Run the server that most tutorials start. The last of them, on tenants, makes keys necessary."""
    folder = tmp_path_factory.mktemp("first-server")
    link_programs(folder)
    with (
        tutorial_environment() as environment,
        serving(environment.adapt(FIRST_SERVER), environment.variables, folder) as shown,
    ):
        environment.shown = shown
        yield environment


def test_python_prints_answers(first_server: TutorialEnvironment) -> None:
    for printed in run_python_blocks([first_server.adapt(code) for code in PYTHON]):
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
        for command in ("replica --port 8001", "gateway --config fleet.yaml"):
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


def test_exceptions_are_about_commands_that_pages_have() -> None:
    """A command that a page no longer has, or now runs, has no reason and no replacement here."""
    texts = {page.name: page.read_text() for page in GUIDES}
    commands = {
        page.name: [
            command
            for block in read_blocks(page)
            if block.language in {*SHELLS, "python"}
            for command in split_commands(block)
        ]
        for page in GUIDES
    }
    for page, reasons in NOT_RUN.items():
        for start in reasons:
            assert any(command.startswith(start) for command in commands[page]), start
    for text in AS_SEEN:
        assert any(text in page for page in texts.values()), text
    run = {param.id for param in PAGES}
    assert EXHAUSTIVE | NEED_A_SERVER | BEFORE.keys() | AFTER.keys() <= run


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_print_the_shown_output(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    blocks = [
        Block(language, title, command)
        for block in read_blocks(page)
        for language, title, text in [block]
        for command in (split_commands(block) if language in SHELLS else [text])
        if language not in SHELLS or is_run(page, command)
    ]
    link_programs(tmp_path)
    with ExitStack() as running:
        environment: TutorialEnvironment = (
            request.getfixturevalue("first_server")
            if page.name in NEED_A_SERVER or any(is_first_server(block) for block in blocks)
            else running.enter_context(tutorial_environment())
        )
        terminal = running.enter_context(open_terminal(environment, tmp_path))
        run_block(terminal, environment.adapt(BEFORE.get(page.name, ":")), None)
        following = [*blocks[1:], Block("", "", "")]
        for block, shown in zip(blocks, following, strict=True):
            language, title, text = block
            adapted = environment.adapt(text)
            expected = environment.adapt(shown.text) if shown.title == "Output" else None
            if title == "Server":
                printed = (
                    environment.shown
                    if is_first_server(block)
                    else running.enter_context(serving(adapted, environment.variables, tmp_path))
                )
                assert is_as_shown(printed, expected), printed
            elif title.startswith("Change in "):
                change_line(tmp_path / title.removeprefix("Change in "), adapted)
            elif language in {"yaml", "json"} and title:
                (tmp_path / title).write_text(adapted)
            elif language in SHELLS:
                run_block(terminal, adapted, expected)
        run_block(terminal, environment.adapt(AFTER.get(page.name, ":")), None)
    if page.parent.name == "tutorials":
        assert_ignored(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_fleet_in_postgresql_is_restored(tmp_path: Path) -> None:
    """Lose the machine with database and state, and restore the fleet as the page says."""
    page = [block.text for block in read_blocks(ROOT / "docs/how-to/back-up-and-restore.md")]
    back_up, restore = (
        next(text for text in page if text.startswith(start)) for start in ("pg_dump", "createdb")
    )
    programs = Path(find_program("pg_dump", "postgresql")).parent
    start = next(text for text in page if text.startswith("argosy up --fleet"))
    with tutorial_environment() as environment, running_postgres() as server:
        url, other = server.create("argosy"), server.url("postgres")
        settings = (
            f"{QUESTIONS}export PATH=$PATH:{programs} ARGOSY_STORE='{url}'\nSERVER='{other}'\n"
        )
        with open_terminal(environment, tmp_path) as terminal:
            for commands in (settings, USED_FLEET, back_up):
                run_block(terminal, environment.adapt(commands), None)
        kill_processes(environment.state)
        shutil.rmtree(environment.state / "argosy")
        lost = 'dropdb --force --maintenance-db="$SERVER" argosy\n'
        with open_terminal(environment, tmp_path) as terminal:
            for commands in (settings, lost, restore, start, SAME_ANSWERS):
                run_block(terminal, environment.adapt(commands), None)


@contextmanager
def open_terminal(environment: TutorialEnvironment, folder: Path) -> Iterator[Terminal]:
    with subprocess.Popen(
        ["bash"],
        cwd=folder,
        env=environment.variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            yield Terminal(shell)
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


def is_first_server(block: Block) -> bool:
    """Whether the command of a block starts what `make serve` starts."""
    command = block.text.replace("sentence-transformers/all-MiniLM-L6-v2", str(MINILM))
    return block.text == FIRST_SERVER or command.split() == MAKE_SERVE.split()


def assert_ignored(folder: Path) -> None:
    """Assert that the files that a page leaves in a checkout are ignored there."""
    names = sorted(path.name for path in folder.iterdir())
    check = ["git", "check-ignore", "--no-index", *names]
    ignored = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ignored.stdout.splitlines() == names, "see .gitignore"


def change_line(file: Path, line: str) -> None:
    """Replace the line of a file with the same key."""
    key = line.partition(":")[0]
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line if old.startswith(f"{key}:") else old for old in lines))


def is_as_shown(printed: str, expected: str | None) -> bool:
    """Whether a page shows the beginning of what was printed, where `...` stands for anything."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return expected is None or CHECKER.check_output(
        expected.rstrip() + "...", printed + "\n.", flags
    )


def run_block(terminal: Terminal, commands: str, expected: str | None) -> None:
    """Run the commands of a block and check what they print. Commands that only look are repeated for a minute."""
    is_look = LOOK.match(commands) and expected is not None
    deadline = time.monotonic() + (LOOK_TIMEOUT_S if is_look else 0)
    while True:
        printed, status = terminal.run(commands)
        is_shown = is_as_shown(printed, expected)
        if (status == "0" and is_shown) or time.monotonic() > deadline:
            break
        time.sleep(LOOK_INTERVAL_S)
    assert status == "0", f"{commands}{printed}"
    assert is_shown, f"{commands}{printed}"
