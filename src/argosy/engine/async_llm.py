"""Asyncio variant of `LLM`, which runs the engine core in a separate process and serves concurrent callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from argosy.engine.engine_config import EngineConfig
from argosy.engine.llm_options import build_engine_config, drop_neutral_options
from argosy.engine.offline_prompts import Conversation, PromptInput
from argosy.engine.offline_request_processor import (
    ChatOptions,
    GenerationOptions,
    OfflineRequestProcessor,
    RequestOptions,
    configure_quiet_logging,
    expand_sampling_params,
)
from argosy.engine.outputs import RequestOutput, RequestOutputCollector
from argosy.engine.serving.engine_core.engine_client import EngineClient
from argosy.engine.serving.engine_core.in_flight_requests import DeltaStream
from argosy.protocol import SamplingParams

T = TypeVar("T")


class AsyncLLM:
    """Model in a separate process, which is restarted when it fails. Use it as `async with AsyncLLM() as llm`.

    The arguments are those of `LLM`. Entering the context raises `EngineFailedError` if the model cannot be loaded.
    All methods may be called by many tasks at once, and their requests share the batch. Methods raise `ApiError` for
    a request that cannot be served. Cancelling a task aborts its requests.
    """

    def __init__(
        self,
        model: str | Path | EngineConfig | None = None,
        *,
        chat_template: str | Path | None = None,
        seed: int | None = None,
        **options: Any,  # noqa: ANN401 - fields of `EngineConfig`
    ) -> None:
        configure_quiet_logging()
        self._config = build_engine_config(model, options)
        self._chat_template = chat_template
        self._seed = seed
        self._client = EngineClient(self._config, log_level="warning")
        self._loaded_processor: OfflineRequestProcessor | None = None

    async def __aenter__(self) -> Self:
        ready = await self._client.start()
        self._loaded_processor = await asyncio.to_thread(
            OfflineRequestProcessor,
            self._config,
            ready,
            chat_template=self._chat_template,
            seed=self._seed,
        )
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._client.close()

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        n: int | None = None,
        **options: Unpack[GenerationOptions],
    ) -> RequestOutput:
        """Complete a prompt and return the finished output with `n` continuations."""
        return await _last_output(self.stream(prompt, sampling_params, n=n, **options))

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        n: int | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput:
        """Answer a conversation and return the finished output with `n` answers."""
        return await _last_output(self.stream_chat(messages, sampling_params, n=n, **options))

    def stream(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        n: int | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt and yield the cumulative output each time new tokens arrive."""
        return self._stream(
            self._processor.prepare_completion, prompt, sampling_params, dict(options) | {"n": n}
        )

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        n: int | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation and yield the cumulative output each time new tokens arrive."""
        return self._stream(
            self._processor.prepare_chat, messages, sampling_params, dict(options) | {"n": n}
        )

    @property
    def _processor(self) -> OfflineRequestProcessor:
        if self._loaded_processor is None:
            raise RuntimeError("the model is not loaded; use `async with AsyncLLM(...) as llm:`")
        return self._loaded_processor

    async def _stream(
        self,
        prepare: Callable[[T, SamplingParams | None, RequestOptions], RequestOutputCollector],
        prompt: T,
        sampling_params: SamplingParams | None,
        options: RequestOptions,
    ) -> AsyncGenerator[RequestOutput, None]:
        (params,) = expand_sampling_params(sampling_params, 1)
        collector = await asyncio.to_thread(prepare, prompt, params, drop_neutral_options(options))
        streams: list[DeltaStream] = []
        has_delta = asyncio.Event()
        try:
            for request in collector.requests:
                streams.append(self._client.generate(request))
                streams[-1].set_listener(has_delta.set)
            while not collector.is_done:
                await has_delta.wait()
                has_delta.clear()
                for stream in streams:
                    delta = stream.drain()
                    if delta is not None and collector.push(delta):
                        stream.close()  # a stop string ends the output before the engine does
                yield collector.to_output()
        finally:
            for stream in streams:
                stream.close()


async def _last_output(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    last = None
    async for output in outputs:
        last = output
    assert last is not None  # noqa: S101 - a stream yields its output at least once
    return last
