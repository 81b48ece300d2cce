"""What the gateway reads of a generation request; everything else of the body passes through as it came."""

from __future__ import annotations

import math
import random
import re
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from argosy.protocol import ApiError, invalid, parse

BYTES_PER_TOKEN = 4
"""For estimates where the prompt is text and no tokenizer is at hand."""
DEFAULT_OUTPUT = 256
"""Expected output where the request names no limit."""
LONGEST_TOKEN_BYTES = 128
"""No token of a tokenizer in use is longer, runs of spaces included."""
MOST = 1 << 24
"""Tokens of an answer, as far as estimates go; who asks for more is refused by the replica."""
MOST_CHOICES = 1 << 14
"""Of one request. Where its answer is ended here each is told so, whether its replica knew of so many or not."""
MEDIA_TOKENS = 1024
"""For estimates: about what models that see make of one picture."""
MOST_BESIDE_BYTES = 4 * 1024 * 1024
"""Of a body, beside its prompt: millions of fields would take a second and a gigabyte to look at."""
WHOLE_ONLY = ("prompt_logprobs", "resume")
"""Fields that streams do not take, or take differently."""

_MEDIA = re.compile(rb'"(?:data:[^",]{0,100},)?[A-Za-z0-9+/\\]{512,}={0,2}"')
"""A picture or sound in base64."""
_IDS = re.compile(rb"\[[\s0-9,]*+\]")
"""One list of ids."""


class _StreamOptions(msgspec.Struct, gc=False):
    include_usage: bool | None = None


class _Known(msgspec.Struct, gc=False):
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


class _Part(msgspec.Struct, gc=False):
    text: str | None = None


class _Message(msgspec.Struct, gc=False):
    content: str | list[_Part] | None = None

    @property
    def length(self) -> int:
        """Characters of its text."""
        if isinstance(self.content, list):
            return sum(len(part.text or "") for part in self.content)
        return len(self.content or "")


class Ask(msgspec.Struct, frozen=True, eq=False):
    """One request for chat or completions."""

    fields: dict[str, Raw]
    model: str
    stream: bool
    choices: int
    """Answers: `n` for each prompt."""
    max_output: int | None
    """None: it names no limit, or one below 0, which means the same to those who take it (llama.cpp)."""
    prompt: bytes
    """The prompt or the messages, as they came."""
    prompt_tokens: int
    """Estimated, with those that it gives itself to go on after (`resume`)."""
    session: str
    """What it belongs together with: of equal sessions, all go to one replica where the pool's rule is `hash`."""
    prompts: int = 1
    """A completion may have several."""
    timeout_s: float = math.inf
    """Seconds from its arrival that the client allows."""
    priority: int = 0
    """By how many tiers the client sets it back behind its others."""
    include_usage: bool = False
    """Its stream is to end with the usage."""
    drew_seed: bool = False
    """The seed was drawn here; the client gave none."""
    request_id: str = ""
    """What the client calls it."""
    domain: str = ""
    """Whose cached prompts it may share; empty: everybody's."""
    size: int = 0
    """Bytes of its body, which it keeps."""

    def exceeds(self, tokens: int) -> bool:
        """Whether one of its prompts has more tokens than that, whatever the tokenizer.

        Of messages only what everybody's template shows counts. What makes no sense is for a replica to refuse.
        """
        if "truncate_prompt_tokens" in self.fields:
            return False
        try:
            return _exceeds(self.prompt, tokens)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False

    @property
    def gathers(self) -> bool:
        """Whether its whole answer can be put together from a stream of ours."""
        return all(bytes(self.fields.get(name, b"null")) == b"null" for name in WHOLE_ONLY)


def read(raw: bytes, prompt_field: str, domain: str = "", session: str = "") -> Ask:
    """Read the body of who has `domain`; `session` is what the headers say of that.

    Raises ApiError 400: a field that is needed is missing or ill-typed; 413: more than can be looked at.
    """
    known = parse(_Known, raw)
    prompt = bytes(known.messages if prompt_field == "messages" else known.prompt)
    if known.model is None or not prompt:
        name = "model" if known.model is None else prompt_field
        raise ApiError(
            400, "missing_required_parameter", f"Missing parameter '{name}'. Add it.", param=name
        )
    fields = fields_of(raw, len(prompt))
    prompts = _prompts(prompt)
    choices = max(1, known.n or 1) * prompts
    if choices > MOST_CHOICES:
        message = f"A request has at most {MOST_CHOICES} answers: 'n' of each prompt. Send several."
        raise invalid(message, prompt_field if known.n is None else "n")
    drew_seed = known.seed is None
    if drew_seed:
        # Drawn here, so that whichever replica carries the answer on draws the same tokens.
        fields["seed"] = Raw(b"%d" % random.getrandbits(62))
    limit = known.max_completion_tokens
    limit = known.max_tokens if limit is None else limit
    options = known.stream_options
    return Ask(
        fields=fields,
        model=known.model,
        stream=bool(known.stream),
        choices=choices,
        max_output=None if limit is None or limit < 0 else min(limit, MOST),
        prompt=prompt,
        prompt_tokens=_tokens(prompt) + bytes(known.resume).count(b","),
        session=known.session_id or session or known.prompt_cache_key or "",
        prompts=prompts,
        timeout_s=math.inf if known.timeout_s is None else known.timeout_s,
        priority=known.priority or 0,
        include_usage=options is not None and bool(options.include_usage),
        drew_seed=drew_seed,
        request_id=known.request_id or "",
        domain=domain,
        size=len(raw),
    )


def _exceeds(prompt: bytes, tokens: int) -> bool:
    """See `Ask.exceeds`. Decodes no more than it has to: there may be millions of ids. Raises DecodeError."""
    if len(prompt) <= tokens:
        return False
    if _IDS.fullmatch(prompt):
        return prompt.count(b",") >= tokens
    if not prompt.startswith(b"["):
        return len(msgspec.json.decode(prompt, type=str)) // LONGEST_TOKEN_BYTES > tokens
    if _first_of(prompt) == b"{":  # a chat's messages
        if len(prompt) // LONGEST_TOKEN_BYTES <= tokens:
            return False
        messages = msgspec.json.decode(prompt, type=list[_Message])
        return sum(one.length for one in messages) // LONGEST_TOKEN_BYTES > tokens
    return any(_exceeds(bytes(one), tokens) for one in msgspec.json.decode(prompt, type=list[Raw]))


def fields_of(raw: bytes, prompt_bytes: int) -> dict[str, Raw]:
    """All fields of a body, of which so much may be prompt. Raises ApiError 400 or 413.

    Their texts are UTF-8: some are read here only later, for some servers.
    """
    if len(raw) - prompt_bytes > MOST_BESIDE_BYTES:
        message = f"The body has more than {MOST_BESIDE_BYTES} bytes beside its prompt. Send less."
        raise ApiError(413, "request_too_large", message)
    if not raw.isascii():
        _check_utf8(raw)
    return parse(dict[str, Raw], raw)


def _check_utf8(raw: bytes) -> None:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        message = f"The body is not valid UTF-8 (byte {error.start}). Send UTF-8."
        raise invalid(message, code="invalid_json") from error


def _tokens(prompt: bytes) -> int:
    """How many a prompt or chat has, about."""
    if b";base64," not in prompt and b'"input_audio"' not in prompt:
        return max(1, len(prompt) // BYTES_PER_TOKEN)
    media = _MEDIA.findall(prompt)
    text = (len(prompt) - sum(map(len, media))) // BYTES_PER_TOKEN
    return max(1, text + MEDIA_TOKENS * len(media))


def _prompts(prompt: bytes) -> int:
    """How many prompts a completion has: a list of texts or of lists of ids has as many as items."""
    if _first_of(prompt) not in {b'"', b"["}:
        return 1  # one text, one list of ids, or a chat's messages
    return len(msgspec.json.decode(prompt, type=list[Raw]))


def _first_of(listed: bytes) -> bytes:
    """What the first item of a JSON list begins with; empty where it is none. There may be megabytes of white space."""
    if not listed.startswith(b"["):
        return b""
    return listed[1:64].lstrip()[:1] or listed[1:].lstrip()[:1]
