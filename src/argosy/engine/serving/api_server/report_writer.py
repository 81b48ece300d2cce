"""Report of what a replica did for a request, as a comment in a stream to a gateway."""

from __future__ import annotations

from collections import Counter

import msgspec

from argosy.engine.serving.api_server.event_writers import EventWriter
from argosy.engine.serving.preprocessing.response_spec import ResponseSpec
from argosy.engine.serving.text.choice import Choice
from argosy.engine.serving.text.parsed_choice import ParsedChoice
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import MAX_REPORTED_CHARS, RequestReport, format_comment

_encode = msgspec.json.Encoder().encode


class ReportWriter:
    """An `EventWriter` that adds a `protocol.RequestReport` to the events of another writer, once all choices ended."""

    def __init__(
        self,
        spec: ResponseSpec,
        writer: EventWriter,
        tokenizer: Tokenizer,
        *,
        includes_content: bool,
    ) -> None:
        """Create the writer. `includes_content` adds rendered prompts and raw outputs to the report."""
        self._spec = spec
        self._writer = writer
        self._tokenizer = tokenizer
        self._is_reported = False
        self._outputs: list[list[int]] | None = (
            [list(choice.request.resumed_tokens) for choice in spec.choices]
            if includes_content
            else None
        )

    def encode_output(self, choice: Choice) -> bytes:
        tokens = choice.new_tokens
        events = self._writer.encode_output(choice)
        if self._outputs is not None and not choice.new_tokens:  # else the writer holds it back
            self._outputs[choice.index] += tokens
        if self._is_reported or any(other.finish_reason is None for other in self._spec.choices):
            return events
        self._is_reported = True
        return events + format_comment(b"argosy report " + _encode(self._build_report()))

    def encode_usage(self) -> bytes:
        return self._writer.encode_usage()

    def _build_report(self) -> RequestReport:
        spec, compile_s = self._spec, self._spec.plan.compile_s
        parsed = [choice for choice in spec.choices if isinstance(choice, ParsedChoice)]
        events: Counter[str] = Counter()
        for choice in parsed:
            events.update(choice.event_counts)
        has_grammar = bool(spec.choices[0].request.params.grammar)
        output_tokens = sum(choice.output_tokens for choice in spec.choices)
        return RequestReport(
            grammar_compile_ms=None if compile_s is None else 1000 * compile_s,
            masked_steps=output_tokens - (spec.reasoning_tokens or 0) if has_grammar else 0,
            reasoning_tokens=spec.reasoning_tokens,
            tool_calls=sum(choice.ended_calls for choice in parsed),
            malformed_calls=sum(choice.started_calls - choice.ended_calls for choice in parsed),
            parser_events=dict(events),
            warnings=[w.code for choice in spec.choices for w in spec.warnings(choice)],
            prompts=self._prompts(),
            outputs=[self._decode(tokens) for tokens in self._outputs or ()],
        )

    def _prompts(self) -> list[str]:
        if self._outputs is None:
            return []
        return [self._decode(prompt.token_ids) for prompt in self._spec.prompts]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)[:MAX_REPORTED_CHARS]
