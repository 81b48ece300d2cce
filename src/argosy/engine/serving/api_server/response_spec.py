"""What an answer looks like, as the body asked for it: the facts that streams and whole answers share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from argosy.engine.serving.api_server.logprob_formatter import LogprobFormatter
from argosy.engine.serving.preprocessing.request_processor import GatewayHeaders, PreparedRequest
from argosy.engine.serving.text.choice import Choice, PromptState, ScoringChoice
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import (
    GenerationRequest,
    PromptTokenUsageInfo,
    StreamOptions,
    Usage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSpec:
    """One answer's identity, choices and options."""

    id: str
    created_at: int
    """Unix time in seconds."""
    model: str
    choices: list[Choice]
    prompts: list[PromptState]
    logprob_formatter: LogprobFormatter | None
    """None when no log-probabilities are wanted."""
    prompt_logprob_formatter: LogprobFormatter | None
    """The same for vLLM's records of the prompt."""
    include_token_ids: bool
    """Token ids are wanted beside the text."""
    include_usage: bool
    continuous_usage: bool
    include_resume_metadata: bool
    """The stream tells a gateway where it can be carried on, and goes on where a cut one ended."""
    resumed_cached_tokens: int
    """Cached tokens that the cut one told of the prompts that it began."""
    delivered_tokens: list[int]
    """How many tokens of each choice that one has told."""

    @classmethod
    def from_request(
        cls,
        body: GenerationRequest,
        prepared: PreparedRequest,
        tokenizer: Tokenizer,
        headers: GatewayHeaders,
    ) -> ResponseSpec:
        """The frame of the answer to `body`."""
        name = (
            LogprobFormatter.by_id if body.return_tokens_as_token_ids else LogprobFormatter.by_text
        )
        skips = prepared.requests[0].params.skip_special_tokens
        writer = name(tokenizer, tokenizer.special_ids if skips else frozenset())
        leads = prepared.requests[:: prepared.n]
        echoes: Sequence[str | None] = prepared.echo_texts or [None] * len(leads)
        told = [
            headers.delivered_tokens(index, len(request.resumed_tokens))
            for index, request in enumerate(prepared.requests)
        ]
        carried_on = told if headers.resumed_cached_tokens is not None else []
        begun = {index // prepared.n for index, tokens in enumerate(carried_on) if tokens}
        prompts = [
            PromptState(token_ids=lead.prompt, echo_text=echo, is_resumed=index in begun)
            for index, (lead, echo) in enumerate(zip(leads, echoes, strict=True))
        ]
        kind = ScoringChoice if prepared.is_scoring else Choice
        options = body.stream_options or StreamOptions()
        return cls(
            id=headers.request_id,
            created_at=int(time.time()) if headers.created_at is None else headers.created_at,
            model=body.model,
            choices=[
                kind(
                    index,
                    request,
                    prompts[index // prepared.n],
                    tokenizer,
                    is_complete=index in prepared.completed_choices,
                )
                for index, request in enumerate(prepared.requests)
            ],
            prompts=prompts,
            logprob_formatter=None if prepared.logprobs is None else writer,
            prompt_logprob_formatter=None if body.prompt_logprobs is None else writer,
            include_token_ids=bool(body.return_token_ids),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
            include_resume_metadata=headers.wants_resume_metadata,
            resumed_cached_tokens=headers.resumed_cached_tokens or 0,
            delivered_tokens=told,
        )

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        completion_tokens = sum(choice.output_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokenUsageInfo(cached_tokens=self.cached_tokens),
        )

    @property
    def cached_tokens(self) -> int:
        """Those of the prompts, each where the answer to it began: a seam changes no usage."""
        return self.resumed_cached_tokens + sum(prompt.cached_tokens for prompt in self.prompts)

    def is_resumed(self, choice: Choice) -> bool:
        """Whether the choice's beginning has been told, by the stream that this one carries on."""
        return self.delivered_tokens[choice.index] > 0

    @property
    def has_timed_out_empty(self) -> bool:
        """Whether the request ran out of its time before its first token."""
        return all(c.finish_reason == "timeout" and not c.output_tokens for c in self.choices)


def new_response_id(prefix: str) -> str:
    """A fresh id: `chatcmpl-...`, `cmpl-...`."""
    return f"{prefix}-{uuid.uuid4().hex}"
