"""Resume metadata: token ids in SSE comments, from which a gateway can resume a stream on another replica.

A gateway enables it with the header `x-argosy-resume-metadata`. After the events of each output follows one comment:

    : argosy <choice> <ids, comma-separated>[ <finish reason>[ <early stop reason>]]

Another comment precedes the first output. With several prompts it is repeated when more cached tokens are known:

    : argosy prompt <tokens> <cached tokens>[ <names of its KV blocks, in base64>]

Events count only together with the comment that follows them. An interrupted stream is resumed after its last complete
comment. The ids go into the body's `resume`, the cached tokens into the header `x-argosy-cached-tokens`. Nothing is
then missing or sent twice.

The header `x-argosy-resume-given` contains, comma-separated, how many ids of each choice the client itself supplied. No
stream has delivered those. The header `x-argosy-arithmetic-id` identifies the arithmetic. A request that sends it back
gets 409 from a replica of another model.
"""

from __future__ import annotations

from binascii import b2a_base64

from argosy.engine.serving.api_server.event_writers import EventWriter
from argosy.engine.serving.preprocessing.response_spec import ResponseSpec
from argosy.engine.serving.text.choice import Choice
from argosy.protocol import format_comment


class ResumeMetadataWriter:
    """An `EventWriter` that adds resume metadata to the events of another writer."""

    def __init__(self, spec: ResponseSpec, writer: EventWriter) -> None:
        self._spec = spec
        self._writer = writer
        self._reported_cached_tokens: int | None = None
        """Number of cached tokens in the last prompt comment."""

    def encode_output(self, choice: Choice) -> bytes:
        tokens = choice.new_tokens
        events = self._writer.encode_output(choice)
        if choice.new_tokens:
            return events  # the writer holds the output back
        comment = b"argosy %d %s" % (choice.index, ",".join(map(str, tokens)).encode())
        if choice.finish_reason is not None:
            comment += b" " + choice.finish_reason.encode()
            if choice.early_stop is not None:
                comment += b" " + choice.early_stop.encode()
        return self._encode_prompt_metadata() + events + format_comment(comment)

    def encode_usage(self) -> bytes:
        return self._writer.encode_usage()

    def _encode_prompt_metadata(self) -> bytes:
        cached_tokens = self._spec.cached_tokens
        if cached_tokens == self._reported_cached_tokens:
            return b""
        self._reported_cached_tokens = cached_tokens
        prompts = self._spec.prompts
        tokens = sum(len(prompt.token_ids) for prompt in prompts)
        comment = b"argosy prompt %d %d" % (tokens, cached_tokens)
        if len(prompts) == 1 and prompts[0].block_names:
            comment += b" " + b2a_base64(prompts[0].block_names, newline=False)
        return format_comment(comment)
