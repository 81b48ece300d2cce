"""Token counts of one request, which the engine, the gateway and the ledger share."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from argosy.protocol.openai_responses import CompletionTokenUsageInfo, PromptTokenUsageInfo, Usage


class TokenUsage(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Tokens of a request: each prompt once, and the output of all choices."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Part of `prompt_tokens` that was found in a prefix cache."""
    output_tokens: int = 0
    reasoning_tokens: int | None = None
    """Part of `output_tokens` inside reasoning blocks. None if the server reports none."""

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return max(0, self.prompt_tokens - self.cached_tokens)

    def to_wire(self) -> Usage:
        """Convert to the `usage` object of the OpenAI API."""
        reasoning = self.reasoning_tokens
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.output_tokens,
            total_tokens=self.prompt_tokens + self.output_tokens,
            prompt_tokens_details=PromptTokenUsageInfo(cached_tokens=self.cached_tokens),
            completion_tokens_details=(
                UNSET
                if reasoning is None
                else CompletionTokenUsageInfo(reasoning_tokens=min(reasoning, self.output_tokens))
            ),
        )


NO_TOKENS = TokenUsage()
