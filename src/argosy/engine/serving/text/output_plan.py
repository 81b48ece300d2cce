"""Output plan: what the output of one request may be, and how it is parsed and presented."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from argosy.constraints import OutputConstraint, Relaxation, Tool
from argosy.engine.serving.output_parsing import OutputFormat
from argosy.protocol import ReasoningBlock, ResponseWarning


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """Constraints of an output, and the way in which it is parsed."""

    output_format: OutputFormat | None = None
    """Format by which the output is parsed. None if it is plain text."""
    markers: Mapping[int, str] = field(default_factory=dict)
    """Text of each special token that structures the output."""
    tools: tuple[Tool, ...] = ()
    parse_calls: bool = False
    in_reasoning: bool = False
    """Whether the prompt has opened the reasoning block."""
    include_reasoning: bool = True
    """Whether the response contains the reasoning."""
    is_named_call: bool = False
    """Whether the request forced one named tool. Its finish reason is then `stop`, as with OpenAI's API."""
    is_legacy: bool = False
    """Whether the request used `functions`, whose one call is a `function_call`."""
    document: OutputConstraint | None = None
    """Constraint that is not enforced completely, so that the finished content is validated."""
    grammar: str = ""
    """Grammar of the output. Empty if it is not constrained."""
    compile_s: float | None = None
    """Seconds to compile the grammar, 0 if it was cached. None without a grammar."""
    reasoning: ReasoningBlock | None = None
    banned_token_ids: tuple[int, ...] = ()
    relaxations: tuple[tuple[str, Relaxation], ...] = ()
    """Request field and keyword of each part of a schema that is not enforced."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of the request without effect on this output."""

    @property
    def warnings(self) -> list[ResponseWarning]:
        """A warning for each keyword that is not enforced."""
        return [
            ResponseWarning(
                code="schema_relaxed",
                message=f"The keyword '{item.keyword}' at {item.pointer} is not enforced: {item.reason}.",
                param=param,
            )
            for param, item in self.relaxations
        ]
