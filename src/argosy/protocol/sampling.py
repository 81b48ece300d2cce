"""How the next token is chosen: the sampling parameters of one sequence, as they travel on the wire."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Sampling parameters of one sequence; defaults are those of the OpenAI API.

    Every value has been checked at the door (`engine.serving.door.validate`) before the engine sees it.
    """

    max_tokens: int = 16
    """Most output tokens, those of a resumed request included."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are not sampled before this many output tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output tokens (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Over output tokens."""
    frequency_penalty: float = 0.0
    """Over output tokens."""
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    """When not empty, only these tokens may be sampled."""
    seed: int | None = None
    """None asks the door to draw one; the engine always gets a number (0 <= seed < 2**63)."""
    stop: tuple[str, ...] = ()
    """Stop strings, matched on the detokenized text by the server, not by the core."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: off; k >= 0: the sampled token's log-probability and the k most likely tokens'."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for each token of the prompt but the first."""
    skip_special_tokens: bool = True
