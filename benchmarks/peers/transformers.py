"""Hugging Face transformers: `generate` in batches of 16 in order of arrival, or its continuous batching."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

from benchmarks.peers.worker import Engine, Request, Settings, Stamps, main

BATCH = 16
CACHE_PAGES = 256
"""Number of pages of 256 tokens, enough for every workload."""


class Generate:
    """`generate`, with each batch padded to its longest prompt and run to its longest output."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self._model = _load(settings)
        self.version = f"{transformers.__version__}, batches of {BATCH}"

    def run(self, requests: list[Request]) -> Stamps:
        """Serve the requests, batch after batch."""
        begin = time.perf_counter()
        stamps: Stamps = []
        for start in range(0, len(requests), BATCH):
            batch = requests[start : start + BATCH]
            times: list[float] = []
            self._generate(batch, lambda times=times: times.append(time.perf_counter() - begin))
            end = time.perf_counter() - begin
            stamps += [[*times[: request.output - 1], end] for request in batch]
        return stamps

    def _generate(self, batch: list[Request], on_token: Any) -> None:  # noqa: ANN401 - a callback
        longest = max(len(request.prompt) for request in batch)
        count = max(request.output for request in batch)
        padding = [longest - len(request.prompt) for request in batch]
        ids = [[1] * pad + request.prompt for pad, request in zip(padding, batch, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]

        def stamp(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            on_token()
            return scores

        with torch.inference_mode():
            self._model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=1,
                logits_processor=[stamp],
            )


class Continuous:
    """Continuous batching manager with paged attention, default pages and a token budget of 1,024 per step."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        config = transformers.ContinuousBatchingConfig(
            num_blocks=CACHE_PAGES,
            max_batch_tokens=1024,
            allow_block_sharing=settings.prefix_cache,
        )
        self._manager: Any = _load(settings).init_continuous_batching(
            transformers.GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=config,
        )
        self._manager.start()
        self.version = f"{transformers.__version__}, continuous batching"

    def run(self, requests: list[Request]) -> Stamps:
        """Serve the requests. The manager takes timestamps from the same clock."""
        begin = time.perf_counter()
        names = [
            self._manager.add_request(
                request.prompt, max_new_tokens=request.output, record_timestamps=True
            )
            for request in requests
        ]
        timestamps: dict[str, list[float]] = {}
        while len(timestamps) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                timestamps[result.request_id] = [stamp - begin for stamp in result.timestamps]
            elif not self._manager.is_running():
                raise RuntimeError("the generation thread of transformers has ended")
        return [timestamps[name] for name in names]


def _load(settings: Settings) -> Any:  # noqa: ANN401 - a class made at run time
    model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.bfloat16)
    return model.eval()


def load(settings: Settings) -> Engine:
    """Return the engine for the kind of batching."""
    return Continuous(settings) if settings.batching == "continuous" else Generate(settings)


if __name__ == "__main__":
    main(load)
