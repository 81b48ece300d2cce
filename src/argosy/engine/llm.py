"""Offline inference in Python, on the same engine loop as the server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar, Unpack

from argosy.engine.engine_config import COMPUTE_ENVIRONMENT, DType, EngineConfig, WeightFormat
from argosy.engine.offline_request_processor import (
    ChatOptions,
    Conversation,
    GenerationOptions,
    OfflineRequestProcessor,
    RequestOptions,
    TextOrTokens,
    configure_quiet_logging,
    expand_sampling_params,
    split_conversations,
    split_prompts,
    to_engine_config,
)
from argosy.engine.outputs import RequestOutput, RequestOutputCollector
from argosy.engine.progress_bar import NoProgressBar, ProgressBar, RichProgressBar
from argosy.protocol import ApiError, SamplingParams

ProgressMode = Literal["auto", "off"]
"""Progress display of a run. `auto` draws a bar on standard error if that is a terminal."""

T = TypeVar("T")


class LLM:
    """Model in this process. Not thread-safe.

    The constructor loads the model, which takes seconds.

    Args:
        model: Directory, hub name or complete `EngineConfig`. None loads the bundled model. An `EngineConfig` replaces
            all other settings.
        revision: Branch, tag or commit of a hub model.
        dtype: Dtype of weights and activations.
        quantize: Format of quantized weights.
        threads: CPU threads. None takes every usable CPU.
        max_model_len: Maximum tokens of one sequence, prompt and output together.
        max_seqs: Maximum number of sequences running at once.
        kv_memory_bytes: Memory for the KV cache. None takes a fraction of the free memory.
        host_kv_bytes: Host memory for evicted KV blocks.
        progress: Progress display of `generate` and `chat`.

    Raises:
        ValueError: The model cannot be loaded. The message says what to do.
    """

    def __init__(
        self,
        model: str | Path | EngineConfig | None = None,
        *,
        revision: str | None = None,
        dtype: DType = "auto",
        quantize: WeightFormat | None = None,
        threads: int | None = None,
        max_model_len: int | None = None,
        max_seqs: int = 64,
        kv_memory_bytes: int | None = None,
        host_kv_bytes: int = 0,
        progress: ProgressMode = "auto",
    ) -> None:
        config = to_engine_config(
            model,
            revision=revision,
            dtype=dtype,
            quantize=quantize,
            threads=threads,
            max_model_len=max_model_len,
            max_seqs=max_seqs,
            kv_memory_bytes=kv_memory_bytes,
            host_kv_bytes=host_kv_bytes,
        )
        configure_quiet_logging()
        for name, value in COMPUTE_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from argosy.engine.serving.engine_core.core import EngineCore  # imports torch

        self._progress = progress
        self._core = EngineCore(config, time.monotonic, lambda _what, _done: None)
        self._processor = OfflineRequestProcessor(config, self._core.info)

    def generate(
        self,
        prompts: TextOrTokens | Sequence[TextOrTokens],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        **options: Unpack[GenerationOptions],
    ) -> list[RequestOutput]:
        """Complete prompts and return one output per prompt, in order, with `n` continuations each.

        Args:
            prompts: One prompt or several, as text or lists of token ids.
            sampling: Sampling parameters for all prompts, or one item per prompt.
            n: Continuations per prompt.
            options: Constraints of the text (`GenerationOptions`).

        Raises:
            ApiError: A prompt cannot be served. All prompts are validated before the first step.
        """
        return self._run_to_completion(
            _prepare_all(
                self._processor.prepare_completion,
                split_prompts(prompts),
                sampling,
                n,
                dict(options),
            )
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or several, with the arguments and errors of `generate`.

        `options` are those of the HTTP API (`ChatOptions`). The outputs have reasoning and tool calls beside the text.
        """
        return self._run_to_completion(
            _prepare_all(
                self._processor.prepare_chat,
                split_conversations(messages),
                sampling,
                n,
                dict(options),
            )
        )

    def _run_to_completion(self, collectors: list[RequestOutputCollector]) -> list[RequestOutput]:
        """Step the engine until every request has ended. On an error, abort the remaining requests."""
        collectors_by_id = {request.id: c for c in collectors for request in c.requests}
        for collector in collectors:
            for request in collector.requests:
                self._core.add(request)
        try:
            with (
                RichProgressBar(len(collectors))
                if self._progress == "auto"
                else NoProgressBar() as progress_bar
            ):
                while collectors_by_id:
                    self._step(collectors_by_id, progress_bar)
        finally:
            self._core.abort(list(collectors_by_id))
            while self._core.has_work:
                self._core.step()
        return [collector.to_output() for collector in collectors]

    def _step(
        self, collectors_by_id: dict[str, RequestOutputCollector], progress_bar: ProgressBar
    ) -> None:
        stopped_ids = []
        deltas = self._core.step().deltas
        progress_bar.add_tokens(sum(len(delta.tokens) for delta in deltas))
        for delta in deltas:
            collector = collectors_by_id.get(delta.id)
            if collector is None:
                continue
            if collector.push(delta):
                del collectors_by_id[delta.id]
                if delta.finish_reason is None:  # a stop string, which the core does not check
                    stopped_ids.append(delta.id)
                if collector.is_done:
                    progress_bar.advance(1)
        if stopped_ids:
            self._core.abort(stopped_ids)


def _prepare_all(
    prepare: Callable[[T, SamplingParams, int, RequestOptions], RequestOutputCollector],
    prompts: list[T],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    n: int,
    options: RequestOptions,
) -> list[RequestOutputCollector]:
    """Validate all prompts. An `ApiError` names the number of the invalid prompt."""
    collectors = []
    for number, (prompt, params) in enumerate(
        zip(prompts, expand_sampling_params(sampling, len(prompts)), strict=True)
    ):
        try:
            collectors.append(prepare(prompt, params, n, options))
        except ApiError as error:
            message = f"prompt {number}: {error.message}"
            raise ApiError(error.status, error.code, message, param=error.param) from error
    return collectors
