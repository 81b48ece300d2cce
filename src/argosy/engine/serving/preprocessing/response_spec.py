"""Response specification: engine requests, choices and options of one request, for streamed and whole responses."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from argosy.engine.engine_request import EngineRequest
from argosy.engine.serving.text.choice import Choice, OutputPlan, ParsedChoice, PromptState
from argosy.engine.serving.text.logprob_formatter import LogprobFormatter
from argosy.protocol import (
    PredictionUsage,
    ResponseWarning,
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
    system_fingerprint: str | None
    """Id of the model and the arithmetic, which all replicas that may continue the response share."""
    service_tier: str | None
    """None if the request names none."""
    choices: list[Choice]
    """Choice i of prompt p is at p * n + i, which is also its `index` in the response.

    The first unfinished choice of a prompt reports the prompt's log-probabilities.
    """
    prompts: list[PromptState]
    plan: OutputPlan
    """Constraints of the output, and the way in which it is parsed."""
    ignored_fields: tuple[str, ...]
    """Fields of the request that have no effect on this model."""
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

    @property
    def described(self) -> dict[str, str | None]:
        """Fields of the response, and of each chunk, that describe the server."""
        tier = {} if self.service_tier is None else {"service_tier": self.service_tier}
        return {"system_fingerprint": self.system_fingerprint, **tier}

    @property
    def requests(self) -> list[EngineRequest]:
        """Engine requests of all choices, in their order."""
        return [choice.request for choice in self.choices]

    def usage(self, unsent_tokens: int = 0) -> Usage:
        """Return the token usage so far, without output tokens that are not sent yet."""
        return TokenUsage(
            sum(len(prompt.token_ids) for prompt in self.prompts),
            self.cached_tokens,
            sum(choice.output_tokens for choice in self.choices) - unsent_tokens,
            self.reasoning_tokens,
            self.prediction_usage,
        ).to_wire()

    @property
    def prediction_usage(self) -> PredictionUsage | None:
        """Tokens of the predicted output, once for each choice. None if the request predicts none."""
        cursors = [c.prediction for c in self.choices if c.prediction is not None]
        if not cursors:
            return None
        accepted = [min(cursor.accepted, len(cursor.tokens)) for cursor in cursors]
        return PredictionUsage(
            sum(accepted), sum(len(cursor.tokens) for cursor in cursors) - sum(accepted)
        )

    @property
    def reasoning_tokens(self) -> int | None:
        """Output tokens inside reasoning blocks. None if the output is not parsed."""
        parsed = [choice for choice in self.choices if isinstance(choice, ParsedChoice)]
        return sum(choice.reasoning_tokens for choice in parsed) if parsed else None

    def warnings(self, choice: Choice) -> list[ResponseWarning]:
        """Return the warnings of a finished choice. The first choice has those of the request."""
        warnings = self.plan.warnings if choice.index == 0 else []
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
