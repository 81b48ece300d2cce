"""What an answer looks like, as the body asked for it: the facts that streams and whole answers share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from argosy.engine.serving.api_server.logprob_formatter import LogprobWriter
from argosy.engine.serving.preprocessing.request_processor import Context, Job
from argosy.engine.serving.text.choice import Choice, Prompt, ScoredPrompt
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import (
    CachedTokens,
    GenerationRequest,
    StreamOptions,
    Usage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One answer's identity, choices and options."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[Choice]
    prompts: list[Prompt]
    logprobs: LogprobWriter | None
    """None when no log-probabilities are wanted."""
    prompt_logprobs: LogprobWriter | None
    """The same for vLLM's records of the prompt."""
    token_ids: bool
    """Token ids are wanted beside the text."""
    usage_chunk: bool
    running_usage: bool
    journal: bool
    """The stream tells a gateway where it can be carried on, and goes on where a cut one ended."""
    cached_before: int
    """Cached tokens that the cut one told of the prompts that it began."""
    told: list[int]
    """How many tokens of each choice that one has told."""

    @classmethod
    def of(cls, body: GenerationRequest, job: Job, tokenizer: Tokenizer, context: Context) -> Frame:
        """The frame of the answer to `body`."""
        name = LogprobWriter.by_id if body.return_tokens_as_token_ids else LogprobWriter.by_text
        skips = job.requests[0].params.skip_special_tokens
        writer = name(tokenizer, tokenizer.special_ids if skips else frozenset())
        leads = job.requests[:: job.n]
        echoes: Sequence[str | None] = job.echo or [None] * len(leads)
        told = [
            context.told(index, len(request.output)) for index, request in enumerate(job.requests)
        ]
        carried_on = told if context.cached is not None else []
        begun = {index // job.n for index, tokens in enumerate(carried_on) if tokens}
        prompts = [
            Prompt(token_ids=lead.prompt, echo=echo, begun=index in begun)
            for index, (lead, echo) in enumerate(zip(leads, echoes, strict=True))
        ]
        kind = ScoredPrompt if job.scoring else Choice
        options = body.stream_options or StreamOptions()
        return cls(
            id=context.request_id,
            created=int(time.time()) if context.created is None else context.created,
            model=body.model,
            choices=[
                kind(
                    index,
                    request,
                    prompts[index // job.n],
                    tokenizer,
                    told=index in job.told,
                )
                for index, request in enumerate(job.requests)
            ],
            prompts=prompts,
            logprobs=None if job.logprobs is None else writer,
            prompt_logprobs=None if body.prompt_logprobs is None else writer,
            token_ids=bool(body.return_token_ids),
            usage_chunk=bool(options.include_usage),
            running_usage=bool(options.include_usage and options.continuous_usage_stats),
            journal=context.journal,
            cached_before=context.cached or 0,
            told=told,
        )

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        completion_tokens = sum(choice.output_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=CachedTokens(cached_tokens=self.cached_tokens),
        )

    @property
    def cached_tokens(self) -> int:
        """Those of the prompts, each where the answer to it began: a seam changes no usage."""
        return self.cached_before + sum(prompt.cached_tokens for prompt in self.prompts)

    def carries_on(self, choice: Choice) -> bool:
        """Whether the choice's beginning has been told, by the stream that this one carries on."""
        return self.told[choice.index] > 0

    @property
    def nothing_in_time(self) -> bool:
        """Whether the request ran out of its time before its first token."""
        return all(c.finish == "timeout" and not c.output_tokens for c in self.choices)


def new_id(prefix: str) -> str:
    """A fresh id: `chatcmpl-...`, `cmpl-...`."""
    return f"{prefix}-{uuid.uuid4().hex}"
