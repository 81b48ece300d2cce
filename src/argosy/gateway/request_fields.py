"""What the gateway reads of a generation request; everything else of the body passes through as it came."""

from __future__ import annotations

import math
import random
import re
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from argosy.protocol import ApiError, invalid_request, parse_body

BYTES_PER_TOKEN = 4
"""For estimates where the prompt is text and no tokenizer is at hand."""
DEFAULT_OUTPUT_TOKENS = 256
"""Expected output where the request names no limit."""
MAX_TOKEN_BYTES = 128
"""No token of a tokenizer in use is longer, runs of spaces included."""
MAX_ESTIMATED_OUTPUT_TOKENS = 1 << 24
"""Tokens of an answer, as far as estimates go; who asks for more is refused by the replica."""
MAX_CHOICES = 1 << 14
"""Of one request. Where its answer is ended here each is told so, whether its replica knew of so many or not."""
ESTIMATED_MEDIA_TOKENS = 1024
"""For estimates: about what models that see make of one picture."""
MAX_NON_PROMPT_BYTES = 4 * 1024 * 1024
"""Of a body, beside its prompt: millions of fields would take a second and a gigabyte to look at."""
NON_STREAMING_FIELDS = ("prompt_logprobs", "resume")
"""Fields that streams do not take, or take differently."""

_BASE64_MEDIA = re.compile(rb'"(?:data:[^",]{0,100},)?[A-Za-z0-9+/\\]{512,}={0,2}"')
"""A picture or sound in base64."""
_TOKEN_ID_LIST = re.compile(rb"\[[\s0-9,]*+\]")
"""One list of ids."""


class _StreamOptions(msgspec.Struct, gc=False):
    include_usage: bool | None = None


class _KnownFields(msgspec.Struct, gc=False):
    """The fields that are read here; all others may be anything."""

    model: str | None = None
    messages: Raw = Raw()
    prompt: Raw = Raw()
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    priority: Annotated[int, Meta(ge=0, le=8)] | None = None
    request_id: str | None = None
    resume: Raw = Raw()


class _ContentPart(msgspec.Struct, gc=False):
    text: str | None = None


class _ChatMessage(msgspec.Struct, gc=False):
    content: str | list[_ContentPart] | None = None

    @property
    def text_length(self) -> int:
        """Characters of its text."""
        if isinstance(self.content, list):
            return sum(len(part.text or "") for part in self.content)
        return len(self.content or "")


class RequestFields(msgspec.Struct, frozen=True, eq=False):
    """One request for chat or completions."""

    raw: dict[str, Raw]
    model: str
    stream: bool
    choice_count: int
    """Answers: `n` for each prompt."""
    max_output_tokens: int | None
    """None: it names no limit, or one below 0, which means the same to those who take it (llama.cpp)."""
    raw_prompt: bytes
    """The prompt or the messages, as they came."""
    estimated_prompt_tokens: int
    """Estimated, with those that it gives itself to go on after (`resume`)."""
    session_id: str
    """What it belongs together with: of equal sessions, all go to one replica where the pool's rule is `hash`."""
    prompt_count: int = 1
    """A completion may have several."""
    timeout_s: float = math.inf
    """Seconds from its arrival that the client allows."""
    priority: int = 0
    """By how many tiers the client sets it back behind its others."""
    include_usage: bool = False
    """Its stream is to end with the usage."""
    has_generated_seed: bool = False
    """The seed was drawn here; the client gave none."""
    request_id: str = ""
    """What the client calls it."""
    cache_domain: str = ""
    """Whose cached prompts it may share; empty: everybody's."""
    body_bytes: int = 0
    """Bytes of its body, which it keeps."""

    def exceeds_token_limit(self, max_tokens: int) -> bool:
        """Whether one of its prompts has more tokens than that, whatever the tokenizer.

        Of messages only what everybody's template shows counts. What makes no sense is for a replica to refuse.
        """
        if "truncate_prompt_tokens" in self.raw:
            return False
        try:
            return _exceeds_token_limit(self.raw_prompt, max_tokens)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False

    @property
    def can_aggregate_stream(self) -> bool:
        """Whether its whole answer can be put together from a stream of ours."""
        return all(bytes(self.raw.get(name, b"null")) == b"null" for name in NON_STREAMING_FIELDS)


def parse_request_fields(
    body: bytes, prompt_field: str, cache_domain: str = "", session_id: str = ""
) -> RequestFields:
    """Read the body of who has `domain`; `session` is what the headers say of that.

    Raises ApiError 400: a field that is needed is missing or ill-typed; 413: more than can be looked at.
    """
    known = parse_body(_KnownFields, body)
    prompt = bytes(known.messages if prompt_field == "messages" else known.prompt)
    if known.model is None or not prompt:
        name = "model" if known.model is None else prompt_field
        raise ApiError(
            400, "missing_required_parameter", f"Missing parameter '{name}'. Add it.", param=name
        )
    fields = parse_raw_fields(body, len(prompt))
    prompts = _count_prompts(prompt)
    choices = max(1, known.n or 1) * prompts
    if choices > MAX_CHOICES:
        message = f"A request has at most {MAX_CHOICES} answers: 'n' of each prompt. Send several."
        raise invalid_request(message, prompt_field if known.n is None else "n")
    drew_seed = known.seed is None
    if drew_seed:
        # Drawn here, so that whichever replica carries the answer on draws the same tokens.
        fields["seed"] = Raw(b"%d" % random.getrandbits(62))
    limit = known.max_completion_tokens
    limit = known.max_tokens if limit is None else limit
    options = known.stream_options
    return RequestFields(
        raw=fields,
        model=known.model,
        stream=bool(known.stream),
        choice_count=choices,
        max_output_tokens=None
        if limit is None or limit < 0
        else min(limit, MAX_ESTIMATED_OUTPUT_TOKENS),
        raw_prompt=prompt,
        estimated_prompt_tokens=_estimate_tokens(prompt) + bytes(known.resume).count(b","),
        session_id=known.session_id or session_id or known.prompt_cache_key or "",
        prompt_count=prompts,
        timeout_s=math.inf if known.timeout_s is None else known.timeout_s,
        priority=known.priority or 0,
        include_usage=options is not None and bool(options.include_usage),
        has_generated_seed=drew_seed,
        request_id=known.request_id or "",
        cache_domain=cache_domain,
        body_bytes=len(body),
    )


def _exceeds_token_limit(prompt: bytes, max_tokens: int) -> bool:
    """See `Ask.exceeds`. Decodes no more than it has to: there may be millions of ids. Raises DecodeError."""
    if len(prompt) <= max_tokens:
        return False
    if _TOKEN_ID_LIST.fullmatch(prompt):
        return prompt.count(b",") >= max_tokens
    if not prompt.startswith(b"["):
        return len(msgspec.json.decode(prompt, type=str)) // MAX_TOKEN_BYTES > max_tokens
    if _first_item_byte(prompt) == b"{":  # a chat's messages
        if len(prompt) // MAX_TOKEN_BYTES <= max_tokens:
            return False
        messages = msgspec.json.decode(prompt, type=list[_ChatMessage])
        return sum(one.text_length for one in messages) // MAX_TOKEN_BYTES > max_tokens
    return any(
        _exceeds_token_limit(bytes(one), max_tokens)
        for one in msgspec.json.decode(prompt, type=list[Raw])
    )


def parse_raw_fields(body: bytes, prompt_bytes: int) -> dict[str, Raw]:
    """All fields of a body, of which so much may be prompt. Raises ApiError 400 or 413.

    Their texts are UTF-8: some are read here only later, for some servers.
    """
    if len(body) - prompt_bytes > MAX_NON_PROMPT_BYTES:
        message = (
            f"The body has more than {MAX_NON_PROMPT_BYTES} bytes beside its prompt. Send less."
        )
        raise ApiError(413, "request_too_large", message)
    if not body.isascii():
        _check_utf8(body)
    return parse_body(dict[str, Raw], body)


def _check_utf8(raw: bytes) -> None:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        message = f"The body is not valid UTF-8 (byte {error.start}). Send UTF-8."
        raise invalid_request(message, code="invalid_json") from error


def _estimate_tokens(prompt: bytes) -> int:
    """How many a prompt or chat has, about."""
    if b";base64," not in prompt and b'"input_audio"' not in prompt:
        return max(1, len(prompt) // BYTES_PER_TOKEN)
    media = _BASE64_MEDIA.findall(prompt)
    text = (len(prompt) - sum(map(len, media))) // BYTES_PER_TOKEN
    return max(1, text + ESTIMATED_MEDIA_TOKENS * len(media))


def _count_prompts(prompt: bytes) -> int:
    """How many prompts a completion has: a list of texts or of lists of ids has as many as items."""
    if _first_item_byte(prompt) not in {b'"', b"["}:
        return 1  # one text, one list of ids, or a chat's messages
    return len(msgspec.json.decode(prompt, type=list[Raw]))


def _first_item_byte(listed: bytes) -> bytes:
    """What the first item of a JSON list begins with; empty where it is none. There may be megabytes of white space."""
    if not listed.startswith(b"["):
        return b""
    return listed[1:64].lstrip()[:1] or listed[1:].lstrip()[:1]
