"""Report of a native replica about one request, which it adds to a stream for the gateway's explanation.

A gateway enables it with the header `x-argosy-report: 1`, and with `x-argosy-report: content` if prompt and output may
be kept. The replica sends it as one SSE comment, `: argosy report JSON`, before the metadata comment of the last
output. A gateway that knows all finish reasons then has the report too, and can complete the usage.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

REPORT_HEADER = b"x-argosy-report"
REPORT_CONTENT = b"content"
"""Value of the header that includes prompt and output in the report."""
MAX_REPORTED_CHARS = 64 * 1024
"""Characters of each prompt and output in a report. Longer ones are cut."""

Milliseconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class RequestReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Work of a replica for one request, with all of its choices. Fields that do not apply are left out."""

    grammar_compile_ms: Milliseconds | None = None
    """Time to compile the grammar; 0 if it was cached. None without a grammar."""
    masked_steps: Count = 0
    """Tokens that were sampled under a grammar's mask."""
    reasoning_tokens: Count | None = None
    """Output tokens inside reasoning blocks, including resumed ones. None if the output has no reasoning block."""
    tool_calls: Count = 0
    malformed_calls: Count = 0
    """Tool calls that could not be parsed and became text."""
    parser_events: dict[str, Count] = {}
    """Number of events of the output parser by their kind, such as `reasoning` or `call_start`."""
    warnings: list[str] = []
    """Codes of the warnings in the response."""
    prompts: list[str] = []
    """Rendered prompts, if content is reported."""
    outputs: list[str] = []
    """Raw output of each choice with its special tokens, if content is reported."""

    @property
    def has_content(self) -> bool:
        """Whether the report has prompts or outputs."""
        return bool(self.prompts or self.outputs)

    def without_content(self) -> RequestReport:
        """Return the report without prompts and outputs."""
        return msgspec.structs.replace(self, prompts=[], outputs=[])


_decoder = msgspec.json.Decoder(RequestReport)


def parse_replica_report(text: bytes) -> RequestReport | None:
    """Parse the JSON of a report. Unknown fields are ignored. Returns None for anything else than a report."""
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
