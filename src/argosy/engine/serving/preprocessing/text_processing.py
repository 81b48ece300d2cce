"""Text side of a model: tokenizer, chat template, output format and grammar compiler, loaded from its checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import structlog

from argosy.engine.engine_config import EngineConfig
from argosy.engine.execution.config.checkpoint_config import AUTO_CONFIG
from argosy.engine.grammar import GrammarCompiler, GrammarError, build_grammar_tokenizer
from argosy.engine.serving.core_messages import CoreReady
from argosy.engine.serving.output_parsing import FORMATS, OutputFormat, detect_format
from argosy.engine.serving.pooling import PoolingProcessor
from argosy.engine.serving.preprocessing.output_planner import GrammarCheck
from argosy.engine.serving.preprocessing.request_processor import RequestProcessor
from argosy.engine.serving.preprocessing.sampling_defaults import (
    NO_SAMPLING_DEFAULTS,
    SamplingDefaults,
    read_sampling_defaults,
)
from argosy.engine.serving.text.chat_template import TEMPLATE_FILE, ChatTemplate
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
    detects_format: bool = False
    """Whether the output format follows from the template."""

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
        return cls(
            tokenizer,
            chat_template,
            output_format,
            defaults,
            info,
            detects_format=tool_format == AUTO_FORMAT,
        )

    def with_template_of(self, folder: Path) -> TextProcessing:
        """Return the text side with the chat template of an adapter's folder, or this one if it has none.

        Raises:
            ValueError: The template cannot be read.
        """
        file = folder / TEMPLATE_FILE
        template = self.template.with_file(file) if file.is_file() else self.template
        if template.digest == self.template.digest:
            return self
        output_format = self.output_format
        if self.detects_format:
            output_format = _detect_format(self.tokenizer, template, None)
        return replace(self, template=template, output_format=output_format)

    def create_processor(
        self, ready: CoreReady, config: EngineConfig, check_grammar: GrammarCheck | None = None
    ) -> RequestProcessor:
        """Create the request processor for a core with these properties.

        `check_grammar` is that of another processor with the same tokenizer. None creates one.
        """
        return RequestProcessor(
            self.tokenizer,
            self.template,
            ready,
            config,
            output_format=self.output_format,
            check_grammar=check_grammar or self._create_grammar_check(ready),
            sampling_defaults=self.sampling_defaults,
        )

    def _create_grammar_check(self, ready: CoreReady) -> GrammarCheck:
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

        return check_grammar

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

    if name == AUTO_FORMAT:
        response_template = read_json_object(path / "tokenizer_config.json").get(
            "response_template"
        )
        return _detect_format(
            tokenizer, template, response_template if isinstance(response_template, dict) else None
        )
    if name not in FORMATS:
        raise ValueError(
            f"the tool format {name!r} is unknown; use one of {', '.join(tool_format_names())}"
        )
    return FORMATS[name].with_vocabulary(tokenizer.has_added_token)


def _detect_format(
    tokenizer: Tokenizer, template: ChatTemplate, response_template: dict[str, Any] | None
) -> OutputFormat | None:
    """Find the format that a chat template writes."""
    detected = detect_format(template.source, response_template, tokenizer.has_added_token)
    return None if detected is None else detected.with_vocabulary(tokenizer.has_added_token)
