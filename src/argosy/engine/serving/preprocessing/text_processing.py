"""Text side of a model: tokenizer, chat template, output format and grammar compiler, loaded from its checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import structlog

from argosy.engine.engine_config import EngineConfig
from argosy.engine.execution.config.checkpoint_config import AUTO_CONFIG
from argosy.engine.grammar import GrammarCompiler, GrammarError, build_grammar_tokenizer
from argosy.engine.serving.core_messages import CoreReady
from argosy.engine.serving.output_parsing import FORMATS, OutputFormat, detect_format
from argosy.engine.serving.pooling import PoolingProcessor
from argosy.engine.serving.preprocessing.request_processor import RequestProcessor
from argosy.engine.serving.preprocessing.sampling_defaults import (
    NO_SAMPLING_DEFAULTS,
    SamplingDefaults,
    read_sampling_defaults,
)
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.checkpoint_files import read_json_object, read_tokenizer_info
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import invalid_request

AUTO_FORMAT = "auto"
NO_FORMAT = "none"
COMPILE_TIMEOUT_S = 10.0
"""Time for one grammar, including those that are compiled before it."""


log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)


def tool_format_names() -> tuple[str, ...]:
    """Return the names of the formats of tool calls and reasoning, after `auto` and `none`."""
    return (AUTO_FORMAT, NO_FORMAT, *FORMATS)


@dataclass(frozen=True, slots=True)
class TextProcessing:
    """Tokenizer, chat template and output format of the served model."""

    tokenizer: Tokenizer
    template: ChatTemplate
    output_format: OutputFormat | None = None
    """Format of tool calls and reasoning. None if the model's chats are plain text."""
    sampling_defaults: SamplingDefaults = NO_SAMPLING_DEFAULTS
    """Sampling parameters of requests that do not set them."""
    tokenizer_info: Mapping[str, Any] = field(default_factory=dict)
    """Description of the tokenizer for clients."""

    @classmethod
    def load(
        cls,
        path: Path,
        template: str | None = None,
        tool_format: str = AUTO_FORMAT,
        *,
        generation_config: str = AUTO_CONFIG,
        override_generation_config: Mapping[str, float | None] | None = None,
    ) -> Self:
        """Load the text side of a checkpoint.

        Args:
            path: Directory of the checkpoint.
            template: File that replaces the chat template.
            tool_format: Name of the output format. `auto` detects it, and `none` switches parsing off.
            generation_config: Source of the sampling defaults, see `EngineConfig`.
            override_generation_config: Sampling defaults that replace those of the source.

        Raises:
            ValueError: A file cannot be used, or the format is unknown.
        """
        tokenizer = Tokenizer.load(path)
        chat_template = ChatTemplate.load(path, template)
        output_format = _find_format(path, tokenizer, chat_template, tool_format)
        defaults = read_sampling_defaults(path, generation_config, override_generation_config)
        log.info(
            "text_processing_loaded",
            chat_template=chat_template.origin,
            tool_format=NO_FORMAT if output_format is None else output_format.name,
            sampling_defaults=defaults.values,
            generation_config=defaults.source,
            unapplied=list(defaults.unapplied),
            eos_token_ids=tokenizer.eos_token_ids,
        )
        info = read_tokenizer_info(path, chat_template.default_source)
        return cls(tokenizer, chat_template, output_format, defaults, info)

    def create_processor(self, ready: CoreReady, config: EngineConfig) -> RequestProcessor:
        """Create the request processor for a core with these properties."""
        compiler = GrammarCompiler(
            lambda: build_grammar_tokenizer(self.tokenizer, ready.vocab_size)
        )
        if ready.pooling is None:
            compiler.warm_up()

        def check_grammar(text: str, param: str) -> float:
            started_at, compiles = time.perf_counter(), compiler.compiles
            try:
                compiler.submit(text).result(COMPILE_TIMEOUT_S)
                return time.perf_counter() - started_at if compiler.compiles > compiles else 0.0
            except GrammarError as error:
                raise invalid_request(
                    f"The constraint in '{param}' cannot be compiled: {error}. Simplify it.",
                    param,
                    "invalid_grammar",
                ) from error
            except TimeoutError as error:
                raise invalid_request(
                    f"The constraint in '{param}' takes too long to compile. Simplify it.",
                    param,
                    "invalid_grammar",
                ) from error

        return RequestProcessor(
            self.tokenizer,
            self.template,
            ready,
            config,
            output_format=self.output_format,
            check_grammar=check_grammar,
            sampling_defaults=self.sampling_defaults,
        )

    def create_pooling_processor(
        self, ready: CoreReady, config: EngineConfig
    ) -> PoolingProcessor | None:
        """Create the processor of a core whose model computes vectors, or return None for one that generates."""
        if ready.pooling is None:
            return None
        return PoolingProcessor(self.tokenizer, self.template, ready, config)


def _find_format(
    path: Path, tokenizer: Tokenizer, template: ChatTemplate, name: str
) -> OutputFormat | None:
    if name == NO_FORMAT:
        return None

    def has_token(text: str) -> bool:
        return tokenizer.added_token_id(text) is not None

    if name == AUTO_FORMAT:
        response_template = read_json_object(path / "tokenizer_config.json").get(
            "response_template"
        )
        detected = detect_format(
            template.source,
            response_template if isinstance(response_template, dict) else None,
            has_token,
        )
        return None if detected is None else detected.with_vocabulary(has_token)
    if name not in FORMATS:
        raise ValueError(
            f"the tool format {name!r} is unknown; use one of {', '.join(tool_format_names())}"
        )
    return FORMATS[name].with_vocabulary(has_token)
