"""Sampling parameters of one sequence, as they are sent to the engine."""

from __future__ import annotations

import msgspec


class ReasoningBlock(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Block of reasoning ("thinking") at the start of the output. A grammar applies only after its end."""

    end_ids: tuple[int, ...]
    """Token ids that close the block, as one sequence."""
    start_ids: tuple[int, ...] = ()
    """Token ids that open the block as the first output. Empty if the prompt has opened it."""
    budget: int | None = None
    """Number of reasoning tokens after which the engine closes the block; None for no limit."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Sampling parameters of one sequence, with the defaults of the OpenAI API.

    The package `engine.serving.preprocessing` validates every value before the engine receives it.
    """

    max_tokens: int = 16
    """Largest number of output tokens, including those of a resumed request."""
    min_tokens: int = 0
    """Output tokens before which end-of-sequence and stop tokens are not sampled."""
    temperature: float = 1.0
    """Temperature; 0 for greedy sampling."""
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 for all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Penalty over prompt and output tokens (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Penalty over output tokens."""
    frequency_penalty: float = 0.0
    """Penalty over output tokens."""
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    """Tokens that may be sampled; empty for all."""
    seed: int | None = None
    """Random seed, 0 <= seed < 2**63. The preprocessing draws one for None, so the engine always gets a number."""
    stop: tuple[str, ...] = ()
    """Stop strings. The replica server matches them on the detokenized text, not the engine core."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities are returned besides the sampled one; None for none at all."""
    prompt_logprobs: int | None = None
    """Same as `logprobs` for each prompt token except the first."""
    skip_special_tokens: bool = True
    grammar: str = ""
    """Grammar of the output in the format of llguidance; empty for unconstrained output."""
    reasoning: ReasoningBlock | None = None
    """Reasoning block that precedes the constrained output, or whose length is limited; None for neither."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that are never sampled, such as the trigger of a tool call that the request forbids."""
