"""Replica process with a scripted engine, for tests that send signals.

It prints its URL when it is ready, and "paused" at its first pause.
The prompt selects the output: "wait" and "forever" pause until SIGUSR1, "endless" has very many tokens.
"pause at 9, say TEXT." has the output TEXT, with a pause after 9 tokens. Every other prompt gets a short reply.

Never compared with `argosy replica`.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from typing import cast

import msgspec
import uvloop

from argosy.engine import EngineConfig, EngineRequest, ReplicaServerConfig
from argosy.engine.serving.api_server.replica_server import ReplicaServer
from argosy.engine.serving.engine_core.engine_client import EngineClient
from argosy.models import BUNDLED_MODEL
from argosy.telemetry import configure_logging
from tests.support.fake_engine import FakeEngine, Script, reply_script
from tests.support.replica_servers import load_text_processing

REPLY = "Hello there."


async def run(config: ReplicaServerConfig) -> None:
    text_processing = load_text_processing()

    def script(request: EngineRequest) -> Script:
        reply = reply_script(text_processing.tokenizer, REPLY)
        prompt = text_processing.tokenizer.decode(request.prompt)
        if "wait" in prompt or "forever" in prompt:
            reply.pause_after = 1
        if (said := re.search(r"pause at (\d+), say ([^\n]*)\.", prompt)) is not None:
            reply = reply_script(text_processing.tokenizer, said[2])
            reply.pause_after = int(said[1])
        if "endless" in prompt:
            reply.tokens = reply.tokens[:-1] * 100_000
        return reply

    engine = FakeEngine(text_processing.tokenizer, script, max_model_len=1_000_000)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine.may_continue.set)

    async def announce_pause() -> None:
        await engine.paused.wait()
        announce("paused")

    pauses = asyncio.create_task(announce_pause())
    server = ReplicaServer(
        config,
        EngineConfig(model=str(BUNDLED_MODEL)),
        engine=cast("EngineClient", engine),
        load_text_processing=lambda: text_processing,
        on_ready=announce,
    )
    await server.run()
    pauses.cancel()


def announce(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    configure_logging("json")
    uvloop.run(run(msgspec.json.decode(sys.argv[1], type=ReplicaServerConfig)))
