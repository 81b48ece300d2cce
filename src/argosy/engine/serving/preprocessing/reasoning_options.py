"""Controls of reasoning in a chat body, and the template variables by which models obey them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.protocol import ChatCompletionRequest, invalid_request

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES = ("enable_thinking", "thinking")
"""Template variables that switch reasoning on and off: Qwen, GLM and others, and DeepSeek and Granite."""
MAX_BUDGET = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """Wishes of a request about the model's reasoning."""

    variables: dict[str, Any] = field(default_factory=dict)
    """Template variables, which include the request's own `chat_template_kwargs`."""
    budget: int | None = None
    """Number of reasoning tokens after which the block is closed; None for no limit."""
    is_disabled: bool = False
    """Whether the request asks for an answer without reasoning."""
    include: bool = True
    """Whether the response contains the reasoning."""
    ignored_fields: tuple[str, ...] = ()
    """Fields without effect on this model."""

    @classmethod
    def from_body(cls, body: ChatCompletionRequest, template: ChatTemplate) -> ReasoningOptions:
        """Read the reasoning fields of a body. What the request sets in `chat_template_kwargs` wins.

        Raises:
            ApiError: 400 for an unknown effort or a negative budget.
        """
        variables = dict(body.chat_template_kwargs or {})
        ignored: list[str] = []
        effort = body.reasoning_effort
        if effort is not None:
            if effort not in EFFORTS:
                raise invalid_request(
                    f"'reasoning_effort' must be one of {', '.join(EFFORTS)}.", "reasoning_effort"
                )
            switches = [name for name in SWITCHES if template.reads(name)]
            known = [name for name in ("reasoning_effort", *SWITCHES) if template.reads(name)]
            for name in switches:
                variables.setdefault(name, effort != "none")
            if template.reads("reasoning_effort") and (effort != "none" or not switches):
                variables.setdefault("reasoning_effort", _supported_effort(effort, template))
            if not known:
                ignored.append("reasoning_effort")
        return cls(
            variables=variables,
            budget=_read_budget(body.thinking_token_budget),
            is_disabled=effort == "none" or any(variables.get(name) is False for name in SWITCHES),
            include=body.include_reasoning is not False,
            ignored_fields=tuple(ignored),
        )


def _supported_effort(effort: str, template: ChatTemplate) -> str:
    """Return the effort, or the nearest of low, medium and high for templates that know only these."""
    if template.reads(effort):
        return effort
    order = EFFORTS.index(effort)
    return "low" if order < EFFORTS.index("medium") else "medium" if effort == "medium" else "high"


def _read_budget(budget: int | None) -> int | None:
    if budget is None or budget == -1:
        return None
    if not 0 <= budget <= MAX_BUDGET:
        raise invalid_request(
            f"'thinking_token_budget' must be from 0 to {MAX_BUDGET}, or -1 for no limit.",
            "thinking_token_budget",
        )
    return budget
