"""An engine's process: settings come as an argument, work as JSON lines, and the times of tokens go back.

Runs in the peer's environment: the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

CONTEXT = 4096
"""Tokens of one sequence, at most."""
MAX_SEQS = 64
KV_GIB = 1
"""The KV cache of every engine that lets itself be told: more than any of the workloads fills."""


class Request(NamedTuple):
    """Greedy, `output` tokens whatever they are."""

    prompt: list[int]
    output: int
    at_s: float = 0.0
    """Arrival after the start; only engines that are driven in process for W4 heed it."""


Stamps = list[list[float]]
"""When the tokens of each request came, in seconds after the start; an engine that hands over whole
answers gives the end alone. The first request's first token is always told when it is the only one."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What every engine is told."""

    model: str
    """Directory in Hugging Face layout, bfloat16."""
    weights: str
    """`bf16`, or what they are converted to: `int8`, `int4`."""
    threads: int
    prefix_cache: bool
    batching: str = "continuous"

    def converted(self, form: str) -> Path:
        """Where this model is kept in another engine's form, beside the original."""
        path = Path(self.model)
        return path.with_name(f"{path.name}-{self.weights}.{form}")


class Engine(Protocol):
    """A loaded model."""

    version: str
    """Of the engine, with the settings that a reader has to know."""

    def run(self, requests: list[Request]) -> Stamps:
        """Serve all of it."""
        ...


def main(
    load: Callable[[Settings], Engine], server: Callable[[Settings, int], list[str]] | None = None
) -> None:
    """Serve JSON lines from standard input; with a port as second argument become an HTTP server."""
    settings = Settings(**json.loads(sys.argv[1]))
    if len(sys.argv) > 2:
        if server is None:
            raise SystemExit("this engine has no HTTP server")
        command = server(settings, int(sys.argv[2]))
        os.execvp(command[0], command)  # noqa: S606 - the server takes this process's place
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # what libraries print goes to the log
        engine = load(settings)
        print(json.dumps({"version": engine.version}), file=replies, flush=True)
        for line in sys.stdin:
            stamps = engine.run([Request(*fields) for fields in json.loads(line)])
            print(json.dumps(stamps), file=replies, flush=True)
