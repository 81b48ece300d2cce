"""What the gateway reads of a generation request; everything else of the body passes through as it came."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import Raw

from argosy.protocol import ApiError, invalid, parse

T = TypeVar("T")

BYTES_PER_TOKEN = 4
"""For estimates where the prompt is text and no tokenizer is at hand."""
DEFAULT_OUTPUT = 256
"""Expected output where the request names no limit."""
LONGEST_TOKEN_BYTES = 128
"""No token of a tokenizer in use is longer, runs of spaces included."""
MOST = 1 << 24
"""Choices, and tokens of each, as far as estimates go; who asks for more is refused by the replica."""
WHOLE_ONLY = frozenset({"prompt_logprobs", "resume", "stream_options"})
"""Fields that streams do not take, or take differently."""

_TEXT = msgspec.json.Decoder(str | None)
_NUMBER = msgspec.json.Decoder(int | None)
_TRUTH = msgspec.json.Decoder(bool | None)
_FIELDS = msgspec.json.Decoder(dict[str, Raw] | None)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for chat or completions."""

    fields: dict[str, Raw]
    model: str
    stream: bool
    choices: int
    """Answers: `n` for each prompt."""
    max_output: int | None
    prompt: bytes
    """The prompt or the messages, as they came."""
    session: str
    include_usage: bool = False
    """Its stream is to end with the usage."""
    drew_seed: bool = False
    """The seed was drawn here; the client gave none."""
    domain: str = ""
    """Whose cached prompts it may share; empty: everybody's."""

    @property
    def least_tokens(self) -> int:
        """The prompt has at least so many tokens, whatever the tokenizer."""
        if self.prompt.startswith(b"[") and self.prompt[1:].lstrip()[:1].isdigit():
            return self.prompt.count(b",") + 1
        return len(self.prompt) // LONGEST_TOKEN_BYTES

    @property
    def prompt_tokens(self) -> int:
        """Estimated."""
        return max(1, len(self.prompt) // BYTES_PER_TOKEN)

    @property
    def gathers(self) -> bool:
        """Whether its whole answer can be put together from a stream of ours."""
        return self.fields.keys().isdisjoint(WHOLE_ONLY)


def read(raw: bytes, prompt_field: str, domain: str = "") -> Ask:
    """Read the body of who has `domain`. Raises ApiError 400: a field that is needed is missing or ill-typed."""
    fields = parse(dict[str, Raw], raw)
    model = _field(fields, "model", _TEXT)
    prompt = fields.get(prompt_field)
    if model is None or prompt is None:
        name = "model" if model is None else prompt_field
        raise ApiError(
            400, "missing_required_parameter", f"Missing parameter '{name}'. Add it.", param=name
        )
    choices = _field(fields, "n", _NUMBER)
    limit = _field(fields, "max_completion_tokens", _NUMBER)
    limit = _field(fields, "max_tokens", _NUMBER) if limit is None else limit
    drew_seed = _field(fields, "seed", _NUMBER) is None
    if drew_seed:
        # Drawn here, so that whichever replica carries the answer on draws the same tokens.
        fields = fields | {"seed": Raw(b"%d" % secrets.randbits(62))}
    return Ask(
        fields=fields,
        model=model,
        stream=bool(_field(fields, "stream", _TRUTH)),
        choices=max(1, min(choices or 1, MOST)) * _prompts(prompt),
        max_output=None if limit is None else max(0, min(limit, MOST)),
        prompt=bytes(prompt),
        session=_field(fields, "session_id", _TEXT) or "",
        include_usage=_includes_usage(fields),
        drew_seed=drew_seed,
        domain=domain,
    )


def _prompts(prompt: Raw) -> int:
    """How many prompts a completion has: a list of texts or of lists of ids has as many as items."""
    text = bytes(prompt)
    if not text.startswith(b"[") or text[1:].lstrip()[:1] not in {b'"', b"["}:
        return 1
    return len(msgspec.json.decode(prompt, type=list[Raw]))


def _includes_usage(fields: dict[str, Raw]) -> bool:
    options = _field(fields, "stream_options", _FIELDS)
    return bool(options and _field(options, "include_usage", _TRUTH))


def _field(fields: dict[str, Raw], name: str, decoder: msgspec.json.Decoder[T]) -> T | None:
    """The field's value; None when it is left out or null."""
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise invalid(f"Invalid value for '{name}': {error}.", name, "invalid_type") from error
