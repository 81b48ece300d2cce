"""Coding agents on the command line read a file with their own tool, and answer. The model is scripted.

Install them with npm: `@openai/codex`, `@anthropic-ai/claude-code`, `opencode-ai` and `@qwen-code/qwen-code`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.integration.test_parsed_output import text_processing
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_client import run_gateway_server
from tests.support.replica_servers import MODEL as REPLICA_MODEL
from tests.support.replica_servers import serve

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.engine import EngineRequest

MODEL, NOTE = "scripted", "The ship sails at seven."
ANSWER = "At seven o'clock."
DEADLINE_S = 120


@dataclass(frozen=True)
class Agent:
    """Agent, with the tool by which it reads a file."""

    command: tuple[str, ...]
    tool: str
    arguments: dict[str, Any]
    """Arguments of the tool. `{folder}` stands for the agent's folder."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the environment. `{url}` stands for the gateway."""
    files: dict[str, str] = field(default_factory=dict)
    """Configuration files by their path in the agent's folder, which is its home folder too."""


CODEX_CONFIG = f"""
model = "{MODEL}"
model_provider = "argosy"
model_context_window = 131072

[model_providers.argosy]
name = "Argosy"
base_url = "{{url}}/v1"
env_key = "ARGOSY_API_KEY"
"""
OPENCODE_CONFIG = {
    "model": f"argosy/{MODEL}",
    "autoupdate": False,
    "provider": {
        "argosy": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "{env:ARGOSY_API_KEY}"},
            "models": {MODEL: {"limit": {"context": 131072, "output": 8192}}},
        }
    },
}
PROMPT = "When does the ship sail? See note.txt."
AGENTS = {
    "codex": Agent(
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT),
        *("exec_command", {"cmd": "cat note.txt"}),
        {"ARGOSY_API_KEY": "none"},
        {".codex/config.toml": CODEX_CONFIG},
    ),
    "claude": Agent(
        ("-p", PROMPT),
        *("Read", {"file_path": "{folder}/note.txt"}),
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "opencode": Agent(
        ("run", PROMPT),
        *("read", {"filePath": "{folder}/note.txt"}),
        {"ARGOSY_API_KEY": "none"},
        {"opencode.json": json.dumps(OPENCODE_CONFIG)},
    ),
    "qwen": Agent(
        ("-p", PROMPT),
        *("read_file", {"file_path": "{folder}/note.txt"}),
        {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL},
    ),
}


@contextlib.asynccontextmanager
async def run_scripted_gateway(call: str) -> AsyncIterator[str]:
    """Run a gateway with a model that calls a tool, and answers once the prompt has the note."""
    text = text_processing()

    def script(request: EngineRequest) -> Script:
        prompt = text.tokenizer.decode(request.prompt)
        output = ANSWER if NOTE in prompt else f"<tool_call>\n{call}\n</tool_call>"
        if prompt.endswith("<think>\n"):
            output = f"I think.\n</think>\n\n{output}"
        end = text.tokenizer.eos_token_ids[0]
        tokens = [*text.tokenizer.encode(output, add_special_tokens=False), end]
        return Script(tokens, stop_token=end)

    engine = FakeEngine(text.tokenizer, script, max_model_len=131072)
    async with serve(engine, load_text=text_processing) as replica:
        replicas = [ReplicaConfig(url=replica.url, model=REPLICA_MODEL)]
        config = GatewayConfig(port=0, models=[ModelConfig(name=MODEL, replicas=replicas)])
        async with run_gateway_server(config) as (_, client):
            yield str(client.base_url).rstrip("/")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", AGENTS)
async def test_agent_reads_a_file_and_answers(name: str, tmp_path: Path) -> None:
    agent, program = AGENTS[name], shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not on the PATH: install the agents with npm")
    arguments = json.dumps(agent.arguments).replace("{folder}", str(tmp_path))
    call = f'{{"name": "{agent.tool}", "arguments": {arguments}}}'
    (tmp_path / "note.txt").write_text(NOTE)
    async with run_scripted_gateway(call) as url:
        for path, content in agent.files.items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(content.replace("{url}", url))
        variables = {key: value.replace("{url}", url) for key, value in agent.environment.items()}
        assert ANSWER in await run_agent((program, *agent.command), tmp_path, variables)


async def run_agent(command: tuple[str, ...], home: Path, variables: dict[str, str]) -> str:
    """Run an agent in its home folder, and return what it prints. Kill it with its children at the deadline."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output.decode()
    return output.decode()
