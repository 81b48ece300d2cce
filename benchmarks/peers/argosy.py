"""Argosy's engine core in its own process, and its replica server."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from argosy.engine.engine_config import EngineConfig
from argosy.engine.serving.engine_core.core_start import COMPUTE_ENVIRONMENT
from benchmarks.peers.worker import KV_GIB, MAX_SEQS, Request, Settings, Stamps, main

for name, value in COMPUTE_ENVIRONMENT.items():
    os.environ.setdefault(name, value)


QUANTIZE = ("int8", "int4")
"""Formats that the engine converts to. Others are stored in the checkpoint."""


SPECULATION = {"default": "auto", "auto": "auto", "draft": "auto", "off": "off"}


class Argosy:
    """Engine core that gets requests directly, as in the offline use of the peers."""

    def __init__(self, settings: Settings) -> None:
        from argosy.engine.serving.engine_core.core import EngineCore

        quantized: dict[str, Any] = (
            {"quantize": settings.weights} if settings.weights in QUANTIZE else {}
        )
        config = EngineConfig(
            model=settings.model,
            dtype="bfloat16",
            threads=settings.threads,
            batching=settings.batching,  # type: ignore[arg-type]
            prefix_cache=settings.prefix_cache,
            kv_memory_bytes=KV_GIB << 30,
            max_seqs=MAX_SEQS,
            model_impl=settings.model_impl,  # type: ignore[arg-type]
            speculation=SPECULATION[settings.speculation],
            draft_model=settings.draft,
            **quantized,
        )
        self._core = EngineCore(config, time.perf_counter, lambda _what, _done: None)
        self.version = self._core.info.backend
        self._serial = 0

    def run(self, requests: list[Request]) -> Stamps:
        """Add all requests, then step until all are finished."""
        from argosy.engine.engine_request import EngineRequest
        from argosy.protocol import SamplingParams

        begin = time.perf_counter()
        stamps: dict[str, list[float]] = {}
        for request in requests:
            self._serial += 1
            params = SamplingParams(max_tokens=request.output, temperature=0.0, ignore_eos=True)
            stamps[str(self._serial)] = []
            self._core.add(
                EngineRequest(
                    id=str(self._serial),
                    prompt=request.prompt,
                    params=params,
                    prediction=list(request.prediction),
                )
            )
        while self._core.has_work:
            deltas = self._core.step().deltas
            now = time.perf_counter() - begin
            for delta in deltas:
                stamps[delta.id] += [now] * len(delta.tokens)
        return list(stamps.values())


def server(settings: Settings, port: int) -> list[str]:
    """Return the command of `argosy replica`."""
    quantized = ["--quantize", settings.weights] if settings.weights in QUANTIZE else []
    return [
        *(sys.executable, "-m", "argosy.cli", "replica", settings.model),
        *("--port", str(port), "--dtype", "bfloat16", "--threads", str(settings.threads)),
        *("--kv-memory", f"{KV_GIB}GiB", "--max-seqs", str(MAX_SEQS)),
        *("--batching", settings.batching, "--model-impl", settings.model_impl, *quantized),
    ]


if __name__ == "__main__":
    main(Argosy, server)
