"""Offline use in Python: prompts in, text out, on the same engine loop as the server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from argosy.engine.engine_config import COMPUTE_ENVIRONMENT, DType, EngineConfig, WeightFormat
from argosy.engine.offline_request_processor import (
    Conversation,
    OfflineRequestProcessor,
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
"""`auto` shows a bar on standard error when that is a terminal."""

T = TypeVar("T")


class LLM:
    """A model in this process. Not for use by several threads at once.

    Loading takes seconds; the constructor returns when the model is ready and raises ValueError,
    with the remedy, when it cannot be loaded. Without `model` the bundled one is used; an
    `EngineConfig` in its place sets everything, and the other arguments do not count then. `quantize`
    rounds the weights to int8 or int4 as they are loaded.
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
        from argosy.engine.serving.engine_core.core import EngineCore  # brings torch

        self._progress = progress
        self._core = EngineCore(config, time.monotonic, lambda _what, _done: None)
        self._processor = OfflineRequestProcessor(config, self._core.info)

    def generate(
        self,
        prompts: TextOrTokens | Sequence[TextOrTokens],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
    ) -> list[RequestOutput]:
        """Continue prompts; one output for each, in order, with `n` continuations.

        A prompt is text or a list of token ids. `sampling` is for all prompts, or one for each.
        Raises ApiError, before anything is computed, when one of them cannot be served.
        """
        return self._run_to_completion(
            _prepare_all(self._processor.prepare_completion, split_prompts(prompts), sampling, n)
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; otherwise as `generate`."""
        return self._run_to_completion(
            _prepare_all(self._processor.prepare_chat, split_conversations(messages), sampling, n)
        )

    def _run_to_completion(self, collectors: list[RequestOutputCollector]) -> list[RequestOutput]:
        """Step the engine until every request has ended; leaves nothing in it, whatever happens."""
        open_ = {request.id: c for c in collectors for request in c.requests}
        for collector in collectors:
            for request in collector.requests:
                self._core.add(request)
        try:
            with (
                RichProgressBar(len(collectors))
                if self._progress == "auto"
                else NoProgressBar() as shown
            ):
                while open_:
                    self._step(open_, shown)
        finally:
            self._core.abort(list(open_))
            while self._core.has_work:
                self._core.step()
        return [collector.to_output() for collector in collectors]

    def _step(self, open_: dict[str, RequestOutputCollector], progress_bar: ProgressBar) -> None:
        ended = []
        deltas = self._core.step().deltas
        progress_bar.add_tokens(sum(len(delta.tokens) for delta in deltas))
        for delta in deltas:
            collector = open_.get(delta.id)
            if collector is None:
                continue
            if collector.push(delta):
                del open_[delta.id]
                if delta.finish_reason is None:  # a stop string, which the core knows nothing of
                    ended.append(delta.id)
                if collector.is_done:
                    progress_bar.advance(1)
        if ended:
            self._core.abort(ended)


def _prepare_all(
    prepare: Callable[[T, SamplingParams, int], RequestOutputCollector],
    prompts: list[T],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    n: int,
) -> list[RequestOutputCollector]:
    """Check them all; a refusal says which prompt it is about."""
    collectors = []
    for number, (item, params) in enumerate(
        zip(prompts, expand_sampling_params(sampling, len(prompts)), strict=True)
    ):
        try:
            collectors.append(prepare(item, params, n))
        except ApiError as error:
            message = f"prompt {number}: {error.message}"
            raise ApiError(error.status, error.code, message, param=error.param) from error
    return collectors
