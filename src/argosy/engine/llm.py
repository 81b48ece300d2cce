"""Offline inference in Python, on the same engine loop as the server."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Self, TypeVar, Unpack

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import EngineRequest
from argosy.engine.llm_options import UNSUPPORTED_METHODS, build_engine_config, drop_neutral_options
from argosy.engine.offline_pooling import PoolingCalls
from argosy.engine.offline_prompts import (
    Conversation,
    PromptsInput,
    split_conversations,
    split_prompts,
    to_plain,
)
from argosy.engine.offline_request_processor import (
    ChatOptions,
    GenerationOptions,
    OfflineRequestProcessor,
    RequestOptions,
    configure_quiet_logging,
    expand_sampling_params,
)
from argosy.engine.offline_tokenizer import LLMTokenizer
from argosy.engine.outputs import RequestOutput, RequestOutputCollector, build_failed_output
from argosy.engine.serving.engine_core.core_start import COMPUTE_ENVIRONMENT
from argosy.engine.serving.pooling import read_vector
from argosy.progress_bar import ProgressBar
from argosy.protocol import ApiError, SamplingParams
from argosy.telemetry import CoreStats, ReplicaMetrics

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from argosy.engine.serving.engine_core.core import EngineCore


ProgressMode = Literal["auto", "off"]
"""Progress display of a run. `auto` draws a bar on standard error if that is a terminal."""
ErrorMode = Literal["raise", "return"]
"""Reaction to a prompt that cannot be served: an exception, or an output with `error` beside those of the others."""
CreateBar = bool | Callable[..., Any]
"""Whether to display the progress, or a function such as `tqdm.tqdm` that creates the bar."""
ReportProgress = Callable[[int, int], object]
"""Adds finished prompts and generated tokens to what is displayed."""

T = TypeVar("T")


class MetricValue(NamedTuple):
    """Value of a counter or a gauge."""

    name: str
    value: float
    labels: dict[str, str]


class LLM(PoolingCalls):
    """Model in this process. Not thread-safe.

    The constructor loads the model, which takes seconds. `close`, or the end of a `with` block, frees its memory.

    Args:
        model: Directory, hub name or complete `EngineConfig`. None loads the bundled model.
        chat_template: Jinja source or file of a chat template that replaces that of the checkpoint.
        seed: Seed from which requests without a seed get theirs, so that runs repeat. None takes random seeds.
        progress: Progress display of `generate` and `chat`.
        options: Fields of `EngineConfig`, also under vLLM's names. Options of vLLM that would only
            change speed or memory are ignored with a warning.

    Raises:
        ValueError: The model cannot be loaded, or an option is invalid or not supported. The message says what to do.
        TypeError: An option is unknown.
    """

    def __init__(
        self,
        model: str | Path | EngineConfig | None = None,
        *,
        chat_template: str | Path | None = None,
        seed: int | None = None,
        progress: ProgressMode = "auto",
        **options: Any,  # noqa: ANN401 - fields of `EngineConfig`
    ) -> None:
        configure_quiet_logging()
        config = build_engine_config(model, options)
        for name, value in COMPUTE_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from argosy.engine.serving.engine_core.core import EngineCore  # imports torch

        self._model = config.model
        self._progress = progress
        self._loaded_core: EngineCore | None = EngineCore(
            config, time.monotonic, lambda _what, _done: None
        )
        super().__init__(config, self._core.info)
        self._generation: OfflineRequestProcessor | None = None
        if self._core.info.pooling is None:
            self._generation = OfflineRequestProcessor(
                config, self._core.info, chat_template=chat_template, seed=seed
            )
        self._stats = CoreStats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> NoReturn:
        """Name the substitute for a method of vLLM that does not exist here."""
        remedy = UNSUPPORTED_METHODS.get(name)
        if remedy is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(f"LLM has no {name}. {remedy}")

    def generate(
        self,
        prompts: PromptsInput,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        n: int | None = None,
        use_tqdm: CreateBar = True,
        on_error: ErrorMode = "raise",
        **options: Unpack[GenerationOptions],
    ) -> list[RequestOutput]:
        """Complete prompts and return one output per prompt, in order.

        Args:
            prompts: One prompt or several, as text, token ids or dictionaries with `prompt` or `prompt_token_ids`.
            sampling_params: Sampling parameters for all prompts, or one item per prompt. None takes the model's
                defaults, and 16 tokens.
            n: Continuations per prompt, instead of `SamplingParams.n`.
            use_tqdm: Whether to display the progress, or a function that creates the bar.
            on_error: Whether a prompt that cannot be served raises, or gets an output with `error` and no tokens.
            options: Constraints of the text and further fields (`GenerationOptions`).

        Raises:
            ApiError: A prompt cannot be served. All prompts are validated before the first step.
            ValueError, TypeError: An argument cannot be used. The message says what to do.
        """
        return self._run(
            self._processor.prepare_completion,
            split_prompts(prompts),
            sampling_params,
            dict(options) | {"n": n},
            use_tqdm,
            on_error,
        )

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        n: int | None = None,
        use_tqdm: CreateBar = True,
        on_error: ErrorMode = "raise",
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or several, with the arguments and errors of `generate`.

        `options` are those of the HTTP API (`ChatOptions`). The outputs have reasoning and tool calls beside the text.
        """
        return self._run(
            self._processor.prepare_chat,
            split_conversations(messages),
            sampling_params,
            dict(options) | {"n": n},
            use_tqdm,
            on_error,
        )

    def get_tokenizer(self) -> LLMTokenizer:
        """Return the model's tokenizer."""
        if self._pooling_tokenizer is not None:
            return LLMTokenizer(self._pooling_tokenizer)
        return LLMTokenizer(self._processor.tokenizer, self._processor.processor)

    def get_metrics(self) -> list[MetricValue]:
        """Return the counters and gauges of the engine, as a replica exports them."""
        return read_metrics(self._model, self._stats)

    def reset_prefix_cache(self) -> bool:
        """Forget the KV of all earlier prompts. Returns whether that was possible."""
        return self._core.reset_prefix_cache()

    def close(self) -> None:
        """Free the model's memory. May be called more than once."""
        if self._loaded_core is not None:
            self._loaded_core.close()
            self._loaded_core = None
            gc.collect()

    @property
    def _core(self) -> EngineCore:
        if self._loaded_core is None:
            raise RuntimeError("the LLM is closed; create another one")
        return self._loaded_core

    @property
    def _processor(self) -> OfflineRequestProcessor:
        if self._generation is None:
            raise ValueError(
                "the model computes vectors and generates no text; call embed, score or classify"
            )
        return self._generation

    def _run_pooling(self, requests: list[EngineRequest]) -> list[NDArray[np.float32]]:
        """Step the engine until every request has its vector. On an error, abort the remaining requests."""
        core = self._core
        vectors: dict[str, NDArray[np.float32]] = {}
        for request in requests:
            core.add(request)
        try:
            while len(vectors) < len(requests):
                outputs = core.step()
                self._stats = outputs.stats
                vectors |= {
                    delta.id: read_vector(delta)
                    for delta in outputs.deltas
                    if delta.finish_reason is not None
                }
        finally:
            core.abort([request.id for request in requests])
            while core.has_work:
                self._stats = core.step().stats
        return [vectors[request.id] for request in requests]

    def _run(
        self,
        prepare: Callable[[T, SamplingParams | None, RequestOptions], RequestOutputCollector],
        prompts: list[T],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None,
        options: RequestOptions,
        use_tqdm: CreateBar,
        on_error: ErrorMode,
    ) -> list[RequestOutput]:
        """Validate all prompts, run those that are valid, and return the outputs of all in order."""
        params = expand_sampling_params(sampling_params, len(prompts))
        options = drop_neutral_options(options)
        own_options = [
            _expand_option(options.pop(name, None), len(prompts))
            for name in ("priority", "lora_request")
        ]
        results: list[RequestOutputCollector | RequestOutput] = []
        for number, (prompt, prompt_params, priority, adapter) in enumerate(
            zip(prompts, params, *own_options, strict=True)
        ):
            own = {"priority": priority, "lora_request": adapter}
            prompt_options = options | {k: v for k, v in own.items() if v is not None}
            try:
                results.append(prepare(prompt, prompt_params, prompt_options))
            except ApiError as error:
                message = f"prompt {number}: {error.message}"
                if on_error == "raise":
                    raise ApiError(error.status, error.code, message, param=error.param) from error
                count = options.get("n") or (1 if prompt_params is None else int(prompt_params.n))
                results.append(build_failed_output(f"invalid-{number}", count, message))
        collectors = [item for item in results if isinstance(item, RequestOutputCollector)]
        self._run_to_completion(collectors, use_tqdm)
        return [item if isinstance(item, RequestOutput) else item.to_output() for item in results]

    def _run_to_completion(
        self, collectors: list[RequestOutputCollector], use_tqdm: CreateBar
    ) -> None:
        """Step the engine until every request has ended. On an error, abort the remaining requests."""
        core = self._core
        collectors_by_id = {request.id: c for c in collectors for request in c.requests}
        for collector in collectors:
            for request in collector.requests:
                core.add(request)
        try:
            with self._open_progress_bar(use_tqdm, len(collectors)) as report_progress:
                while collectors_by_id:
                    self._step(core, collectors_by_id, report_progress)
        finally:
            core.abort(list(collectors_by_id))
            while core.has_work:
                self._stats = core.step().stats

    @contextlib.contextmanager
    def _open_progress_bar(self, use_tqdm: CreateBar, total: int) -> Iterator[ReportProgress]:
        """Show the progress of `total` prompts. Yields a function that counts finished prompts and tokens."""
        if not isinstance(use_tqdm, bool):
            with contextlib.closing(use_tqdm(total=total, desc="generating")) as callers_bar:
                yield lambda prompts, _tokens: callers_bar.update(prompts) if prompts else None
            return
        is_shown = use_tqdm and self._progress == "auto"
        started_at, finished, generated = time.monotonic(), 0, 0
        with ProgressBar("generating", total, is_shown=is_shown) as bar:

            def report(prompts: int, tokens: int) -> None:
                nonlocal finished, generated
                finished, generated = finished + prompts, generated + tokens
                rate = generated / max(time.monotonic() - started_at, 1e-3)
                bar.update(advance=prompts, note=f"{finished}/{total} prompts, {rate:.0f} tokens/s")

            yield report

    def _step(
        self,
        core: EngineCore,
        collectors_by_id: dict[str, RequestOutputCollector],
        report_progress: ReportProgress,
    ) -> None:
        stopped_ids = []
        outputs = core.step()
        self._stats = outputs.stats
        report_progress(0, sum(len(delta.tokens) for delta in outputs.deltas))
        for delta in outputs.deltas:
            collector = collectors_by_id.get(delta.id)
            if collector is None:
                continue
            if collector.push(delta):
                del collectors_by_id[delta.id]
                if delta.finish_reason is None:  # a stop string, which the core does not check
                    stopped_ids.append(delta.id)
                if collector.is_done:
                    report_progress(1, 0)
        if stopped_ids:
            core.abort(stopped_ids)


def _expand_option(value: object, count: int) -> list[Any]:
    """Return an option's value for each of `count` prompts, given one for all or a list."""
    plain = to_plain(value)
    return plain if isinstance(plain, list) else [plain] * count


def read_metrics(model: str, stats: CoreStats) -> list[MetricValue]:
    """Return the counters and gauges of an engine core, which docs/reference/metrics.md describes."""
    metrics = ReplicaMetrics(model)
    metrics.update_stats(stats, ready=True)
    return [
        MetricValue(sample.name, sample.value, dict(sample.labels))
        for family in metrics.collect()
        if family.type in ("counter", "gauge")
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
