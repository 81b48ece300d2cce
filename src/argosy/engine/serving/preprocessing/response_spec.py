"""Response specification: the options and state that streamed and whole responses share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from argosy.engine.serving.preprocessing.request_processor import GatewayHeaders, PreparedRequest
from argosy.engine.serving.text.choice import Choice, PromptState
from argosy.engine.serving.text.logprob_formatter import LogprobFormatter
from argosy.engine.serving.text.parsed_choice import ParsedChoice
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import (
    GenerationRequest,
    ResponseWarning,
    StreamOptions,
    TokenUsage,
    Usage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSpec:
    """Identity, choices and options of one response."""

    id: str
    created_at: int
    """Unix time in seconds."""
    model: str
    choices: list[Choice]
    prompts: list[PromptState]
    logprob_formatter: LogprobFormatter | None
    """None if no log-probabilities are wanted."""
    prompt_logprob_formatter: LogprobFormatter | None
    """Formatter for vLLM's prompt log-probabilities. None if they are not wanted."""
    include_token_ids: bool
    """Whether token ids are sent with the text."""
    include_usage: bool
    continuous_usage: bool
    include_resume_metadata: bool
    """Whether the stream contains resume metadata and continues where an interrupted stream ended."""
    resumed_cached_tokens: int
    """Cached tokens that the resumed stream reported for the prompts that it began."""
    delivered_tokens: list[int]
    """Number of tokens of each choice that the resumed stream delivered."""
    request_warnings: tuple[ResponseWarning, ...] = ()
    """Differences between what the request asked for and what is done, for all choices."""
    compile_s: float | None = None
    """Seconds to compile the grammar, 0 if it was cached. None without a grammar."""

    @classmethod
    def from_request(
        cls,
        body: GenerationRequest,
        prepared: PreparedRequest,
        tokenizer: Tokenizer,
        headers: GatewayHeaders,
    ) -> ResponseSpec:
        """Create the specification of the response to `body`."""
        create_formatter = (
            LogprobFormatter.by_id if body.return_tokens_as_token_ids else LogprobFormatter.by_text
        )
        skip_special_tokens = prepared.requests[0].params.skip_special_tokens
        formatter = create_formatter(
            tokenizer, tokenizer.special_ids if skip_special_tokens else frozenset()
        )
        parents = prepared.requests[:: prepared.n]
        echoes: Sequence[str | None] = prepared.echo_texts or [None] * len(parents)
        delivered = [
            headers.delivered_tokens(index, len(request.resumed_tokens))
            for index, request in enumerate(prepared.requests)
        ]
        resumed = delivered if headers.resumed_cached_tokens is not None else []
        resumed_prompts = {index // prepared.n for index, tokens in enumerate(resumed) if tokens}
        prompts = [
            PromptState(
                token_ids=parent.prompt, echo_text=echo, is_resumed=index in resumed_prompts
            )
            for index, (parent, echo) in enumerate(zip(parents, echoes, strict=True))
        ]
        options = body.stream_options or StreamOptions()
        return cls(
            id=headers.request_id,
            created_at=int(time.time()) if headers.created_at is None else headers.created_at,
            model=body.model,
            choices=[
                prepared.create_choice(index, prompts[index // prepared.n], tokenizer)
                for index in range(len(prepared.requests))
            ],
            prompts=prompts,
            logprob_formatter=None if prepared.logprobs is None else formatter,
            prompt_logprob_formatter=None if body.prompt_logprobs is None else formatter,
            include_token_ids=bool(body.return_token_ids),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
            include_resume_metadata=headers.wants_resume_metadata,
            resumed_cached_tokens=headers.resumed_cached_tokens or 0,
            delivered_tokens=delivered,
            request_warnings=prepared.warnings,
            compile_s=prepared.compile_s,
        )

    def usage(self) -> Usage:
        """Return the token usage so far."""
        return TokenUsage(
            sum(len(prompt.token_ids) for prompt in self.prompts),
            self.cached_tokens,
            sum(choice.output_tokens for choice in self.choices),
            self.reasoning_tokens,
        ).to_wire()

    @property
    def reasoning_tokens(self) -> int | None:
        """Output tokens inside reasoning blocks. None if the output is not parsed."""
        parsed = [choice for choice in self.choices if isinstance(choice, ParsedChoice)]
        return sum(choice.reasoning_tokens for choice in parsed) if parsed else None

    def warnings(self, choice: Choice) -> list[ResponseWarning]:
        """Return the warnings of a finished choice. The first choice has those of the request."""
        warnings = list(self.request_warnings) if choice.index == 0 else []
        problem = choice.document_problem if isinstance(choice, ParsedChoice) else None
        if problem is not None:
            message = f"The answer of choice {choice.index} does not match its schema: {problem}."
            warnings.append(ResponseWarning(code="schema_mismatch", message=message))
        return warnings

    @property
    def cached_tokens(self) -> int:
        """Cached prompt tokens. Counts each prompt where its output began, so a resume does not change the usage."""
        return self.resumed_cached_tokens + sum(prompt.cached_tokens for prompt in self.prompts)

    def is_resumed(self, choice: Choice) -> bool:
        """Return whether the resumed stream already delivered the choice's beginning."""
        return self.delivered_tokens[choice.index] > 0

    @property
    def has_timed_out_empty(self) -> bool:
        """Whether the request timed out before its first token."""
        return all(c.early_stop == "deadline" and not c.output_tokens for c in self.choices)


def new_response_id(prefix: str) -> str:
    """Return a new id such as `chatcmpl-...` or `cmpl-...`."""
    return f"{prefix}-{uuid.uuid4().hex}"
