"""Token usage of a response: as its server reports it, else estimated from the length of the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from argosy.gateway.backends.stream_parser import DeliveredOutput
from argosy.gateway.request_fields import BYTES_PER_TOKEN, RequestFields
from argosy.protocol import TokenUsage

MAX_TOKEN_COUNT = 2**31 - 1
TokenCount = Annotated[int, Meta(ge=0, le=MAX_TOKEN_COUNT)]
"""A plausible token count. Other numbers are not billed, because a few of them would overflow the ledger's sums."""


MAX_SINGLE_TOKEN_BYTES = 32
"""Text of an event up to this size counts as one token. Many servers merge several tokens into one event."""


TEMPLATE_TOKENS = 8192
"""Tokens that templates, tools and a server's own instructions may add to a prompt."""
POOLED_TEMPLATE_TOKENS = 1024
"""Tokens that a model that pools may add to each input. The number of inputs is estimated, within a factor of two."""
MAX_UNKNOWN_CONTEXT = 1 << 20
"""Longest prompt with media of a server whose context length is unknown."""
MAX_UNKNOWN_OUTPUT = 1 << 17
"""Longest response without a limit of a server whose context length is unknown."""
OUTPUT_SLACK_TOKENS = 64
"""Tokens by which servers exceed the limit of a choice, since they count its end differently."""


def find_max_usage(
    fields: RequestFields, find_context_length: Callable[[], int | None]
) -> TokenUsage:
    """Return the most tokens that a request can have, which is also the most that is billed.

    A token of the prompt has at least one byte of the body. Media have no such bound. Models that pool may repeat a
    query and a template for each input. The response has the client's limit, or that of the context.

    Args:
        fields: The request.
        find_context_length: Returns the context length of the model; None if it is unknown.
    """
    limit = fields.max_output_tokens
    max_prompt = fields.body_bytes + TEMPLATE_TOKENS
    if fields.body_bytes < MAX_UNKNOWN_CONTEXT and fields.has_media:
        max_prompt = find_context_length() or MAX_UNKNOWN_CONTEXT
    if not fields.generates:
        text = 2 * BYTES_PER_TOKEN * fields.estimated_prompt_tokens
        max_prompt = max(max_prompt, text + POOLED_TEMPLATE_TOKENS * fields.sequence_count)
        return TokenUsage(min(max_prompt, MAX_TOKEN_COUNT))
    if limit is not None:
        return TokenUsage(max_prompt, 0, fields.choice_count * (limit + OUTPUT_SLACK_TOKENS))
    max_output = find_context_length() or MAX_UNKNOWN_OUTPUT
    return TokenUsage(max_prompt, 0, fields.choice_count * max_output)


def cap_usage(
    reported: TokenUsage, fields: RequestFields, find_context_length: Callable[[], int | None]
) -> TokenUsage:
    """Return the usage that is billed: the reported one, or the most that the request can have had, if that is less.

    Args:
        reported: Usage as the replica reports it, or as it was counted.
        fields: The request.
        find_context_length: Returns the context length of the model; None if it is unknown.
    """
    limit, choices = fields.max_output_tokens, fields.choice_count
    usual_output = choices * (TEMPLATE_TOKENS if limit is None else limit)
    if (
        reported.prompt_tokens <= fields.body_bytes + TEMPLATE_TOKENS
        and reported.output_tokens <= usual_output
    ):
        return reported  # the usual case, in which the context length need not be known
    most = find_max_usage(fields, find_context_length)
    prompt_tokens = min(reported.prompt_tokens, most.prompt_tokens)
    capped = msgspec.structs.replace(
        reported,
        prompt_tokens=prompt_tokens,
        cached_tokens=min(reported.cached_tokens, prompt_tokens),
        output_tokens=min(reported.output_tokens, most.output_tokens),
    )
    return reported if capped == reported else capped


def estimate_tokens(*values: object) -> int:
    """Estimate the number of tokens in one event whose server does not report it. Most events carry one token.

    Args:
        values: Texts and tool call lists of the event. The longest text counts, because some servers send the
            same text under an old and a new field name.
    """
    texts = [
        text
        for value in values
        for text in (_tool_call_arguments(value) if isinstance(value, list) else [value])
    ]
    size = max(len(text.encode()) for text in ("", *texts) if isinstance(text, str))
    return size // BYTES_PER_TOKEN if size > MAX_SINGLE_TOKEN_BYTES else 1


def _tool_call_arguments(calls: list[object]) -> list[object]:
    """Return the arguments of well-formed tool calls, and the inputs of custom ones."""
    return [
        body.get(name)
        for call in calls
        if isinstance(call, dict)
        for kind, name in (("function", "arguments"), ("custom", "input"))
        if isinstance(body := call.get(kind), dict)
    ]


class PromptTokensDetails(msgspec.Struct):
    """The part of `prompt_tokens_details` that is billed."""

    cached_tokens: TokenCount | None = None


class ReportedUsage(msgspec.Struct):
    """Token usage that a server reports. A field is None if the server omits it."""

    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: Any = None
    """Not typed, because it is not billed and must not make the rest unreadable."""

    def apply_to(self, delivered: DeliveredOutput) -> None:
        """Copy the reported counts to `delivered`, whose output is counted already.

        No tokens of a prompt, or of output that was delivered, cannot be true: our own counts remain, and are marked.
        """
        prompt, output = self.prompt_tokens, self.completion_tokens
        is_false = prompt == 0 or (output == 0 and delivered.output_tokens > 0)
        delivered.false_usage = (prompt or 0, output or 0) if is_false else None
        if prompt:
            delivered.prompt_tokens = prompt
        if output:
            delivered.output_tokens = output
        delivered.cached_tokens = min(self.cached_tokens, delivered.prompt_tokens)
        details = self.completion_tokens_details
        reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else None
        if isinstance(reasoning, int) and 0 <= reasoning <= MAX_TOKEN_COUNT:
            delivered.reasoning_tokens = reasoning

    @property
    def cached_tokens(self) -> int:
        """Cached prompt tokens; 0 if the server omits them."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class ChoiceUsageSum:
    """Sum of the usage of all choices, for servers that report the usage of each choice."""

    def __init__(self, fields: RequestFields) -> None:
        self._fields = fields
        self._reported = self._prompt_tokens = self._output_tokens = self._cached_tokens = 0

    def add(self, usage: ReportedUsage) -> ReportedUsage | None:
        """Add the usage of one choice. Return the total after the last choice, else None."""
        self._reported += 1
        self._prompt_tokens += usage.prompt_tokens or 0
        self._output_tokens += usage.completion_tokens or 0
        self._cached_tokens += usage.cached_tokens
        return self.total() if self._reported == self._fields.choice_count else None

    def total(self) -> ReportedUsage | None:
        """Return the sum of the reported usage; None if no choice reported any.

        Each choice repeats the tokens of its prompt, so prompt tokens are counted once per prompt.
        """
        if not self._reported:
            return None
        prompt, cached = (
            min(MAX_TOKEN_COUNT, tokens * self._fields.prompt_count // self._reported)
            for tokens in (self._prompt_tokens, self._cached_tokens)
        )
        return ReportedUsage(
            prompt,
            min(MAX_TOKEN_COUNT, self._output_tokens),
            PromptTokensDetails(cached),
        )


class MessageDelta(msgspec.Struct):
    """Content of a chat message or of a delta of one. Most fields hold text, on some servers lists of parts."""

    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None

    @property
    def has_calls(self) -> bool:
        """Whether the delta has tool calls, or a part of them."""
        return bool(self.tool_calls or self.function_call)

    @property
    def has_content(self) -> bool:
        """Whether the delta carries more than a role."""
        more = self.reasoning or self.reasoning_content or self.refusal or self.tool_calls
        return bool(self.content or more or self.function_call or self.audio)

    @property
    def estimated_tokens(self) -> int:
        """Estimated number of tokens in the delta."""
        return estimate_tokens(*self.texts)

    @property
    def texts(self) -> list[object]:
        """All text fields and the arguments of tool calls."""
        calls = self.tool_calls if isinstance(self.tool_calls, list) else []
        texts = self.content, self.reasoning, self.reasoning_content, self.refusal
        return [*texts, *_tool_call_arguments(calls)]
