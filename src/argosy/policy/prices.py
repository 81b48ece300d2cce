"""Token prices of one request, in whole nano-dollars."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.protocol import TokenUsage


@dataclass(frozen=True, slots=True)
class Rates:
    """Nano-dollars per token that one request pays; fixed when the request begins."""

    input: int
    cached_input: int
    output: int

    def cost_nano_dollars(self, usage: TokenUsage) -> int:
        """Return the cost in nano-dollars."""
        prompt = usage.prompt_tokens
        cached = min(usage.cached_tokens, prompt)
        uncached = prompt - cached
        return (
            uncached * self.input + cached * self.cached_input + usage.output_tokens * self.output
        )


NO_CHARGE = Rates(0, 0, 0)
