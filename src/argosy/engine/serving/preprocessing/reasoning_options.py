"""Controls of reasoning in a chat body, and the template variables by which models obey them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.protocol import ChatCompletionRequest, invalid_request

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES = ("enable_thinking", "thinking")
"""Template variables that switch reasoning on and off: Qwen, GLM and others, and DeepSeek and Granite."""
MAX_BUDGET = 2**31 - 1


def template_variables(body: ChatCompletionRequest, template: ChatTemplate) -> dict[str, Any]:
    """Return the body's template variables. What it sets in `chat_template_kwargs` wins over its reasoning effort.

    Raises:
        ApiError: 400 for an unknown effort.
    """
    variables = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is None:
        return variables
    if effort not in EFFORTS:
        raise invalid_request(
            f"'reasoning_effort' must be one of {', '.join(EFFORTS)}.", "reasoning_effort"
        )
    switches = [name for name in SWITCHES if template.reads(name)]
    for name in switches:
        variables.setdefault(name, effort != "none")
    if template.reads("reasoning_effort") and (effort != "none" or not switches):
        variables.setdefault("reasoning_effort", _supported_effort(effort, template))
    return variables


def ignores_effort(body: ChatCompletionRequest, template: ChatTemplate) -> bool:
    """Return whether the body asks for an effort that the template does not read."""
    return body.reasoning_effort is not None and not any(
        map(template.reads, ("reasoning_effort", *SWITCHES))
    )


def disables_reasoning(body: ChatCompletionRequest, variables: Mapping[str, Any]) -> bool:
    """Return whether a body with these template variables asks for an answer without reasoning."""
    return body.reasoning_effort == "none" or any(variables.get(name) is False for name in SWITCHES)


def reasoning_budget(body: ChatCompletionRequest) -> int | None:
    """Return the number of reasoning tokens after which the block is closed, or None for no limit.

    Raises:
        ApiError: 400 for a negative budget.
    """
    budget = body.thinking_token_budget
    if budget is None or budget == -1:
        return None
    if not 0 <= budget <= MAX_BUDGET:
        raise invalid_request(
            f"'thinking_token_budget' must be from 0 to {MAX_BUDGET}, or -1 for no limit.",
            "thinking_token_budget",
        )
    return budget


def _supported_effort(effort: str, template: ChatTemplate) -> str:
    """Return the effort, or the nearest of low, medium and high for templates that know only these."""
    if template.reads(effort):
        return effort
    order = EFFORTS.index(effort)
    return "low" if order < EFFORTS.index("medium") else "medium" if effort == "medium" else "high"
