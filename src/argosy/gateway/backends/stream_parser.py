"""Interface of the parsers of a replica's stream, and the output that they record as delivered to the client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array

import msgspec

from argosy.protocol import (
    EarlyStopReason,
    PredictionUsage,
    RequestReport,
    TokenUsage,
    find_early_stop,
)


class DeliveredOutput(msgspec.Struct, eq=False):
    """Tokens, finish reasons and prompt counts delivered to the client.

    The object outlives the replicas that produced the output, so that another replica can resume the stream.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_blocks: bytes = b""
    """Names of the prompt's KV blocks in base64; empty if the replica does not report them."""
    prompt_token_ids: array[int] | None = None
    """Token ids of the prompt, if a replica of another backend than Argosy reports them."""
    token_id_pieces: dict[int, list[bytes]] = msgspec.field(default_factory=dict)
    """Token ids by choice, as comma-separated pieces."""
    finish_reasons: dict[int, str] = msgspec.field(default_factory=dict)
    """Finish reason by choice."""
    early_stops: dict[int, EarlyStopReason] = msgspec.field(default_factory=dict)
    """Why choices were ended early, by choice."""
    output_tokens: int = 0
    reasoning_tokens: int | None = None
    """Output tokens inside reasoning blocks; None if the replica reports none."""
    prediction: PredictionUsage | None = None
    """Tokens of the predicted output; None if the replica reports none."""
    false_usage: tuple[int, int] | None = None
    """Prompt and output tokens that a server reported and that cannot be true. The counts above are our own."""
    report: RequestReport | None = None
    """Report of the last native replica about the request."""
    arithmetic_id: str = ""
    """Id of the arithmetic identity that generated the output; empty if it is unknown."""
    is_exact: bool = True
    """Whether a replica that generated the output reports exact results, which another one continues exactly."""

    @property
    def usage(self) -> TokenUsage:
        """The token counts."""
        return TokenUsage(
            self.prompt_tokens,
            self.cached_tokens,
            self.output_tokens,
            self.reasoning_tokens,
            self.prediction,
        )

    def reset(self) -> None:
        """Forget the output of an attempt that never reached the client."""
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.reasoning_tokens = self.prediction = self.report = self.false_usage = None
        self.arithmetic_id = ""
        self.is_exact = True
        self.token_id_pieces.clear()
        self.finish_reasons.clear()
        self.early_stops.clear()

    def record_finish(self, choice: int, finish_reason: str, stop_reason: object) -> None:
        """Record the end of a choice, with the values of its last event."""
        self.finish_reasons[choice] = finish_reason
        early_stop = find_early_stop(finish_reason, stop_reason)
        if early_stop is not None:
            self.early_stops[choice] = early_stop

    def token_ids(self, choice: int) -> list[int]:
        """Return the delivered token ids of a choice."""
        return [int(i) for i in b",".join(self.token_id_pieces.get(choice, ())).split(b",") if i]


class StreamParser(ABC):
    """Parser for the stream of one attempt. One subclass exists for each way to resume a stream."""

    is_done = False
    """Whether `[DONE]` arrived, so that the response is complete."""
    stopped_early = False
    """Whether the gateway found the end of the response before the server did. The server need not continue."""
    failure = ""
    """Reason why the response stays incomplete, if the server reported an error or sent a malformed event."""
    failure_status = 0
    """HTTP status that the error would have had before the stream started; 0 if unknown."""

    @property
    def can_use_fast_path(self) -> bool:
        """Whether native code may forward the next events without this parser (see `fast_path`)."""
        return False

    @abstractmethod
    def feed(self, body: bytes) -> bytes:
        """Parse the next bytes of the stream and return the bytes to forward; nothing after a `failure`."""

    @abstractmethod
    def flush(self) -> bytes:
        """Return the bytes held back until the attempt succeeded. Call it once, at the end."""
