"""The README's examples do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from tests.e2e.server import ARGOSY, URL, Server

pytestmark = pytest.mark.timeout(300)

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
YAML = [code for language, code in BLOCKS if language == "yaml"]
CURL = [code for language, code in BLOCKS if language == "sh" and code.startswith("curl")]


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python(code: str, server: Server) -> None:
    printed = run([sys.executable, "-c", code.replace("http://127.0.0.1:8000", server.url)])
    assert len(printed.split()) > 3


@pytest.mark.parametrize("code", CURL, ids=range(len(CURL)))
def test_curl(code: str, server: Server) -> None:
    streamed = run(["sh", "-c", code.replace("http://127.0.0.1:8000", server.url)])
    assert streamed.count("data: {") > 3
    assert streamed.endswith("data: [DONE]\n\n")


def test_fleet(server: Server, tmp_path: Path) -> None:
    """`argosy gateway` with the example's file, its replicas being the one server that runs."""
    (example,) = YAML
    (tmp_path / "fleet.yaml").write_text(
        re.sub(r"http://127\.0\.0\.1:800\d", server.url, example, count=1)
    )
    command = [ARGOSY, "gateway", "--config", str(tmp_path / "fleet.yaml"), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(found.group() for line in process.stderr if (found := URL.search(line)))
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
                reply = client.completions.create(model="argosy-mini", prompt="The", max_tokens=5)
            assert reply.usage is not None
            assert reply.usage.completion_tokens == 5
        finally:
            process.terminate()
        process.stderr.read()
        assert process.wait() == 0


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 2
    assert CURL
