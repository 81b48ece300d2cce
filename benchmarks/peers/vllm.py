"""vLLM's CPU build: `LLM` offline, and its OpenAI-compatible server."""

from __future__ import annotations

import ctypes.util
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.worker import CONTEXT, KV_GIB, MAX_SEQS, Request, Settings, Stamps, main


def prepare(settings: Settings) -> None:
    """Set the environment variables that vLLM's documentation recommends for CPUs. Its processes inherit them."""
    preload = [str(Path(sys.prefix) / "lib" / "libiomp5.so"), *_allocator()]
    os.environ.update(
        {
            "LD_PRELOAD": ":".join(preload),
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings.threads - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
    )


def _allocator() -> list[str]:
    """Return the recommended allocator, if the machine has it."""
    bundled = sorted((Path(sys.prefix) / "lib").glob("libtcmalloc_minimal.so.*"))
    found = str(bundled[0]) if bundled else ctypes.util.find_library("tcmalloc_minimal")
    return [found] if found else []


NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 5,
}
"""vLLM's lookup in the text, with the lengths of its documentation's examples."""


class Vllm:
    """vLLM's `LLM`. A single request is stepped to time its first token, several requests go through `generate`."""

    def __init__(self, settings: Settings) -> None:
        prepare(settings)
        import vllm

        self._vllm: Any = vllm
        self._llm = vllm.LLM(
            settings.model,
            dtype="bfloat16",
            max_model_len=CONTEXT,
            max_num_seqs=MAX_SEQS,
            enable_prefix_caching=settings.prefix_cache,
            speculative_config=NGRAM if settings.speculation == "auto" else None,
        )
        allocator = "tcmalloc" if _allocator() else "no tcmalloc"
        self.version = f"{vllm.__version__}, libiomp5, {allocator}, threads bound"

    def run(self, requests: list[Request]) -> Stamps:
        """Serve the requests."""
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        begin = time.perf_counter()
        if len(requests) == 1:
            return [self._step(prompts[0], requests[0].output, begin)]
        params = [self._params(request.output) for request in requests]
        self._llm.generate(prompts, params, use_tqdm=False)
        return [[time.perf_counter() - begin]] * len(requests)

    def _step(self, prompt: dict[str, list[int]], output: int, begin: float) -> list[float]:
        engine = self._llm.llm_engine
        engine.add_request("lone", prompt, self._params(output))
        stamps: list[float] = []
        while engine.has_unfinished_requests():
            for answer in engine.step():
                new_tokens = len(answer.outputs[0].token_ids) - len(stamps)
                stamps += [time.perf_counter() - begin] * new_tokens
        return stamps

    def _params(self, output: int) -> Any:  # noqa: ANN401 - vLLM's own type
        return self._vllm.SamplingParams(
            max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False
        )


def server(settings: Settings, port: int) -> list[str]:
    """Return the command behind `vllm serve`, which itself does not work because of the CPU build's package name."""
    prepare(settings)
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", settings.model),
        *("--port", str(port), "--dtype", "bfloat16"),
        *("--max-model-len", str(CONTEXT), "--max-num-seqs", str(MAX_SEQS)),
        *("--uvicorn-log-level", "warning"),
    ]


if __name__ == "__main__":
    main(Vllm, server)
