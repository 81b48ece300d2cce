"""The README's examples do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.server import Server

pytestmark = pytest.mark.timeout(300)

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
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


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 2
    assert CURL
