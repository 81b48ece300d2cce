"""What a gateway needs to carry a stream on elsewhere: token ids beside the text, in comments that readers skip.

Asked for with `x-argosy-resume-metadata`. After the events of each piece comes one block,

    : argosy <choice> <ids, comma-separated>[ <finish reason>]

and before the first, and before another one once more of several prompts are known to be cached,

    : argosy prompt <tokens> <cached tokens>[ <names of its KV blocks, in base64>]

Events count only together with the block that follows them: a stream that was cut goes on after the last whole
block, with the ids in `resume` and the cached tokens in the header `x-argosy-cached-tokens`, and nothing is missing or told
twice. `x-argosy-resume-given` says how many of each choice's ids the client had from the start, comma-separated: those no
stream has told. The header `x-argosy-model-digest` names the model; who sends it back is answered by no other (409).
"""

from __future__ import annotations

from binascii import b2a_base64

from argosy.engine.serving.api_server.event_writers import EventWriter
from argosy.engine.serving.api_server.response_spec import ResponseSpec
from argosy.engine.serving.text.choice import Choice
from argosy.protocol import format_comment


class ResumeMetadataWriter:
    """An `EventWriter` that adds the blocks to what another writes."""

    def __init__(self, frame: ResponseSpec, writer: EventWriter) -> None:
        self._spec = frame
        self._writer = writer
        self._reported_cached_tokens: int | None = None
        """Cached tokens that were told."""

    def encode_output(self, choice: Choice) -> bytes:
        """See `EventWriter`."""
        tokens = choice.pending_tokens
        events = self._writer.encode_output(choice)
        if choice.pending_tokens:
            return events  # not told yet
        entry = b"argosy %d %s" % (choice.index, ",".join(map(str, tokens)).encode())
        if choice.finish_reason is not None:
            entry += b" " + choice.finish_reason.encode()
        return self._encode_prompt_metadata() + events + format_comment(entry)

    def encode_usage(self) -> bytes:
        """See `EventWriter`."""
        return self._writer.encode_usage()

    def _encode_prompt_metadata(self) -> bytes:
        cached = self._spec.cached_tokens
        if cached == self._reported_cached_tokens:
            return b""
        self._reported_cached_tokens = cached
        prompts = self._spec.prompts
        tokens = sum(len(prompt.token_ids) for prompt in prompts)
        entry = b"argosy prompt %d %d" % (tokens, cached)
        if len(prompts) == 1 and prompts[0].block_names:
            entry += b" " + b2a_base64(prompts[0].block_names, newline=False)
        return format_comment(entry)
