"""Process of an engine: gets settings as an argument and requests as JSON lines, and returns the times of tokens.

The module runs in the peer's environment, and uses the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

CONTEXT = 4096
"""Maximum tokens of a sequence."""
MAX_SEQS = 64
KV_GIB = 1
"""KV cache size of every engine that allows to set it, more than any workload fills."""


class Request(NamedTuple):
    """Greedy request for exactly `output` tokens."""

    prompt: list[int]
    output: int
    at_s: float = 0.0
    """Arrival after the start in seconds. Only engines that are driven in process for W4 use it."""
    prediction: Sequence[int] = ()
    """Expected output, which only Argosy uses."""


Stamps = list[list[float]]
"""Times of each request's tokens in seconds after the start. An engine that returns whole answers gives only the end.
The time of the first token is always included for a single request."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings for every engine."""

    model: str
    """Directory in Hugging Face layout, or a GGUF file."""
    weights: str
    """`bf16`, the format to convert to (`int8`, `int4`), or the one that the model is stored in."""
    threads: int
    prefix_cache: bool
    batching: str = "continuous"
    model_impl: str = "auto"
    speculation: str = "default"
    """`off`, `auto` (drafts from the text), `draft` (a draft model), or `default`, which is what the engine does."""
    draft: str | None = None
    """Directory of the draft model."""

    def converted(self, form: str) -> Path:
        """Return the path of this model in another engine's format, beside the original."""
        path = Path(self.model)
        return path.with_name(f"{path.name}-{self.weights}.{form}")


class Engine(Protocol):
    """Loaded model of an engine."""

    version: str
    """Version of the engine, with the settings that matter to readers."""

    def run(self, requests: list[Request]) -> Stamps:
        """Serve the requests."""
        ...


def main(
    load: Callable[[Settings], Engine], server: Callable[[Settings, int], list[str]] | None = None
) -> None:
    """Serve JSON lines from standard input, or run the HTTP server if the second argument is a port."""
    settings = Settings(**json.loads(sys.argv[1]))
    if len(sys.argv) > 2:
        if server is None:
            raise SystemExit("this engine has no HTTP server")
        command = server(settings, int(sys.argv[2]))
        os.execvp(command[0], command)  # noqa: S606 - the server replaces this process
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # redirects what libraries print to the log
        engine = load(settings)
        print(json.dumps({"version": engine.version}), file=replies, flush=True)
        for line in sys.stdin:
            stamps = engine.run([Request(*fields) for fields in json.loads(line)])
            print(json.dumps(stamps), file=replies, flush=True)
