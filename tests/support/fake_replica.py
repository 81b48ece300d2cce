"""A replica process around the scripted engine, for tests that send signals: prints its URL when ready.

What the prompt says decides: "forever" never ends, "wait" ends when SIGUSR1 comes, "endless" goes on
and on; else it is a short reply.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec
import uvloop

from argosy.engine.engine_config import EngineConfig
from argosy.engine.serving.api_server.replica_server import ReplicaServer
from argosy.engine.serving.api_server.replica_server_config import ReplicaServerConfig
from argosy.engine.serving.core_messages import EngineRequest
from argosy.models import BUNDLED_MODEL
from argosy.telemetry import configure_logging
from tests.support.fake_engine import FakeEngine, Script, says
from tests.support.replica_servers import text_tools

REPLY = "Hello there."


async def run(config: ReplicaServerConfig) -> None:
    text = text_tools()

    def script(request: EngineRequest) -> Script:
        reply = says(text.tokenizer, REPLY)
        prompt = text.tokenizer.decode(request.prompt)
        if "wait" in prompt or "forever" in prompt:
            reply.pause_after = 1
        if "endless" in prompt:
            reply.tokens = reply.tokens[:-1] * 100_000
        return reply

    engine = FakeEngine(text.tokenizer, script, max_model_len=1_000_000)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine.go_on.set)
    server = ReplicaServer(
        config,
        EngineConfig(model=str(BUNDLED_MODEL)),
        engine=engine,
        load_text_processing=lambda: text,
        on_ready=announce,
    )
    await server.run()


def announce(url: str) -> None:
    sys.stdout.write(url + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    configure_logging("json")
    uvloop.run(run(msgspec.json.decode(sys.argv[1], type=ReplicaServerConfig)))
