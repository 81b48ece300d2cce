"""Filter that applies the content rule of a request to its prompt, and records what the rule has found."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.gateway.request_context import RequestContext
from argosy.protocol import IGNORED_FIELDS_HEADER, format_names
from argosy.telemetry import GatewayMetrics

_REVEALING_FIELDS = ("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids")
"""Fields that ask for what shows removed text."""


class ContentFilter:
    """Filter for requests that a content rule matches. The response's writer filters the answer."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    async def on_request(self, context: RequestContext) -> bool:
        """Filter the prompt, unless no rule matches. Raises ApiError if the rule refuses it."""
        session = context.content
        if session is None:
            return bool(context.exchange.internal_route)  # which `on_complete` then reads
        try:
            await session.filter_prompt(context.fields, context.api.text_fields)
        except BaseException:
            self.on_complete(context)  # is not called for a filter that has refused
            raise
        if session.filters_output:
            ignored = [name for name in _REVEALING_FIELDS if name in context.fields.raw]
            if ignored:
                context.response_headers.append((IGNORED_FIELDS_HEADER, format_names(ignored)))
        return True

    def on_tokens(self, context: RequestContext, chunk_times: Sequence[float]) -> None:
        """Do nothing: the writer sees each event."""

    async def on_fallback(self, context: RequestContext) -> None:
        """Do nothing: the same rule holds for the model that answers now."""

    def on_complete(self, context: RequestContext) -> None:
        """Record what was found, after filtering what explanations keep."""
        session, delivered = context.content, context.delivered
        if session is None:
            if context.exchange.internal_route and delivered.report is not None:
                # It repeats texts of the client, whose content rule is not known here.
                delivered.report = delivered.report.without_content()
            return
        if delivered.report is not None:
            delivered.report = session.filter_report(delivered.report)
        context.trace.content = session.describe()
        for (side, name, action), count in session.findings.items():
            self._metrics.content_matches.add((session.rule.name, side, name, action), count)
