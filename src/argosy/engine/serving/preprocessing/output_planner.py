"""Planning of a chat's output: its reasoning, which tools the prompt shows, what it may be, and how it is parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from argosy.constraints import OutputConstraint, ToolRequest
from argosy.engine.serving.output_parsing import (
    OutputFormat,
    build_output_grammar,
    prompt_opens_reasoning,
)
from argosy.engine.serving.preprocessing.chat_messages import CallIdMapper, keep_call_id
from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.choice import OutputPlan
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import (
    ApiError,
    ChatCompletionRequest,
    ReasoningBlock,
    invalid_request,
    unsupported_parameter,
)

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES = ("enable_thinking", "thinking")
"""Template variables that switch reasoning on and off: Qwen, GLM and others, and DeepSeek and Granite."""
MAX_BUDGET = 2**31 - 1
GrammarCheck = Callable[[str, str], float]
"""Compiles a grammar for the model's tokenizer and returns the seconds, 0 if it was compiled before.

Raises `ApiError` (400) for the named parameter.
"""


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
    return _effort_variables(effort, template) | variables


def _effort_variables(effort: str, template: ChatTemplate) -> dict[str, Any]:
    """Return the variables that the template reads, with their values for a reasoning effort."""
    reads = template.capabilities().variables
    supported = _supported_effort(effort, template)
    values: dict[str, Any] = {
        **dict.fromkeys(SWITCHES, effort != "none"),
        "low_effort": supported in {"minimal", "low"},
        "medium_effort": supported == "medium",
    }
    if effort == "none":
        values["thinking_mode"] = "disabled"
    if effort != "none" or reads.isdisjoint(SWITCHES):
        values |= dict.fromkeys(("reasoning_effort", "thinking_effort"), supported)
    return {name: value for name, value in values.items() if name in reads}


def ignores_effort(body: ChatCompletionRequest, template: ChatTemplate) -> bool:
    """Return whether the body asks for an effort that the template does not read."""
    effort = body.reasoning_effort
    return effort is not None and not _effort_variables(effort, template)


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


class OutputPlanner:
    """Planner for one model. Immutable and thread-safe, if `check_grammar` is.

    Args:
        tokenizer: Tokenizer of the model.
        template: Chat template of the model.
        output_format: Format of the model's tool calls and reasoning; None if it is unknown.
        check_grammar: Compiles a grammar for the tokenizer, so that the engine does not have to refuse it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        output_format: OutputFormat | None,
        check_grammar: GrammarCheck,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._format = output_format
        self._check_grammar = check_grammar
        texts = () if output_format is None else output_format.tokens
        ids = {text: tokenizer.added_token_id(text) for text in texts}
        self._marker_ids = {
            text: token_id for text, token_id in ids.items() if token_id is not None
        }
        self._markers = {token_id: text for text, token_id in self._marker_ids.items()}
        self._opens_on_request = self._find_switched_block()

    @property
    def map_call_id(self) -> CallIdMapper:
        """Mapping of the ids of earlier tool calls to ids that the model's family accepts."""
        return keep_call_id if self._format is None else self._format.map_call_id

    def template_tools(self, request: ToolRequest) -> list[dict[str, Any]]:
        """Return the tools that the chat template shows the model, in the shape of the OpenAI API.

        Tools that must not be called are shown as well if their trigger can be masked. The prompt, and with it the
        prefix cache, then does not depend on `tool_choice`.

        Raises:
            ApiError: 400 if the model cannot call tools.
        """
        if not request.tools or (request.choice.mode == "none" and not self._trigger_ids()):
            return []
        if request.choice.mode != "none":
            self._require_tool_format()
        return request.template_tools

    def plan(
        self,
        body: ChatCompletionRequest,
        tools: ToolRequest,
        answer: OutputConstraint | None,
        *,
        variables: Mapping[str, Any],
        prompt_text: str,
    ) -> OutputPlan:
        """Plan the output of a chat whose template rendered `variables` and `tools` to `prompt_text`.

        Raises:
            ApiError: 400 if a constraint cannot be compiled, or for a negative reasoning budget.
        """
        output_format, mode = self._format, tools.choice.mode
        budget = reasoning_budget(body)
        relaxations = () if answer is None else tuple((answer.param, r) for r in answer.relaxations)
        if output_format is None:
            text = "" if answer is None else answer.grammar_text
            return OutputPlan(
                grammar=text,
                compile_s=self._compile(text, tools, answer),
                relaxations=relaxations,
                ignored_fields=self._ignored_fields(body, tools, ignores_budget=budget is not None),
            )
        in_reasoning = prompt_opens_reasoning(output_format, prompt_text)
        is_disabled = disables_reasoning(body, variables)
        block = self._reasoning_block(
            output_format, budget, is_disabled=is_disabled, in_reasoning=in_reasoning
        )
        grammar = build_output_grammar(output_format, tools, answer, self._marker_ids.get)
        return OutputPlan(
            output_format=output_format,
            markers=self._markers,
            tools=tools.tools,
            parse_calls=mode != "none",
            in_reasoning=in_reasoning,
            include_reasoning=body.include_reasoning is not False,
            is_named_call=mode == "named",
            is_legacy=tools.is_legacy,
            document=answer if relaxations else None,
            grammar=grammar.text,
            compile_s=self._compile(grammar.text, tools, answer),
            reasoning=block,
            banned_token_ids=self._banned_ids(tools, is_disabled=is_disabled),
            relaxations=(*relaxations, *grammar.relaxations),
            ignored_fields=self._ignored_fields(
                body, tools, ignores_budget=budget is not None and block is None
            ),
        )

    def _ignored_fields(
        self, body: ChatCompletionRequest, tools: ToolRequest, *, ignores_budget: bool
    ) -> tuple[str, ...]:
        names = ["reasoning_effort"] if ignores_effort(body, self._template) else []
        if ignores_budget:
            names.append("thinking_token_budget")
        return (*names, *tools.ignored)

    def _compile(
        self, grammar: str, request: ToolRequest, answer: OutputConstraint | None
    ) -> float | None:
        if not grammar:
            return None
        has_tools = request.choice.mode != "none"
        return self._check_grammar(
            grammar, "tools" if answer is None or has_tools else answer.param
        )

    def _reasoning_block(
        self,
        output_format: OutputFormat,
        budget: int | None,
        *,
        is_disabled: bool,
        in_reasoning: bool,
    ) -> ReasoningBlock | None:
        """Return the reasoning block, or None if the output has none that its tokens show."""
        opener, closer = output_format.reasoning_open, output_format.reasoning_close
        if not opener or not closer:
            return None
        opener_id = self._marker_ids.get(opener)
        if not in_reasoning and (
            opener_id is None  # ordinary text, whose tokens depend on what follows
            or is_disabled
            or (self._opens_on_request and budget is None)
        ):
            return None
        closer_id = self._marker_ids.get(closer)
        end_ids = (
            tuple(self._tokenizer.encode(closer, add_special_tokens=False))
            if closer_id is None
            else (closer_id,)
        )
        start_ids = () if in_reasoning or opener_id is None else (opener_id,)
        return ReasoningBlock(
            end_ids=end_ids, start_ids=start_ids, budget=0 if is_disabled else budget
        )

    def _find_switched_block(self) -> bool:
        """Return whether the template opens a reasoning block only if a variable switches it on.

        Such a model does not open the block itself. A constraint therefore begins at once.
        """
        output_format = self._format
        if output_format is None or not any(map(self._template.reads, SWITCHES)):
            return False
        message = {"role": "user", "content": "Hello"}
        try:
            opened = [
                prompt_opens_reasoning(
                    output_format, self._template.render([message], variables=variables)
                )
                for variables in (dict.fromkeys(SWITCHES, True), {})
            ]
        except ApiError:
            return False
        return opened == [True, False]

    def _banned_ids(self, request: ToolRequest, *, is_disabled: bool) -> tuple[int, ...]:
        """Return the special tokens that would begin what the request does not want."""
        banned: tuple[int, ...] = ()
        if request.tools and request.choice.mode == "none":
            banned = self._trigger_ids()
        opener_id = self._marker_ids.get(
            "" if self._format is None else self._format.reasoning_open
        )
        if is_disabled and opener_id is not None:
            banned = (*banned, opener_id)
        return banned

    def _trigger_ids(self) -> tuple[int, ...]:
        """Return the special tokens that begin a tool call, or nothing if calls begin with ordinary text."""
        if self._format is None or not self._format.triggers:
            return ()
        ids = [self._marker_ids.get(text) for text in self._format.triggers]
        known = tuple(token_id for token_id in ids if token_id is not None)
        return known if len(known) == len(ids) else ()

    def _require_tool_format(self) -> None:
        if self._format is None or not self._format.has_calls:
            raise unsupported_parameter(
                "tools",
                "This model's chat template has no known format of tool calls. Start the server with --tool-format, "
                "or use another model.",
            )
        if not (self._template.reads("tools") or self._template.reads("available_tools")):
            raise unsupported_parameter(
                "tools",
                "This model's chat template does not show tools to the model. Start the server with a "
                "--chat-template that does.",
            )
