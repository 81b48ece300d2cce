"""Description of the output of a model family."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from argosy.engine.serving.output_parsing.harmony import HarmonySyntax
from argosy.engine.serving.output_parsing.json_calls import JsonSyntax, NamedJsonSyntax
from argosy.engine.serving.output_parsing.mapping_calls import MappingSyntax
from argosy.engine.serving.output_parsing.python_calls import PythonSyntax
from argosy.engine.serving.output_parsing.tagged_calls import TagSyntax

_MISTRAL_ID_CHARS = 9
_NINE_CHARACTERS = re.compile(r"[a-zA-Z0-9]{9}")
_KIMI_ID = re.compile(r"functions\..+:\d+")
_ID_ALPHABET = string.ascii_letters + string.digits
CallSyntax = (
    JsonSyntax | NamedJsonSyntax | TagSyntax | PythonSyntax | MappingSyntax | HarmonySyntax | None
)


class ThinkingBlock(NamedTuple):
    """Markers around reasoning."""

    open: str
    close: str
    label: str = ""
    """Word that the model writes behind the opening marker, which is no reasoning."""


class AnswerFrame(NamedTuple):
    """Markers around the answer, which have no meaning for a client."""

    open: str
    close: str
    end: str
    """Marker behind the answer and all calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """Format of the output of a model family.

    Args:
        name: Name for the setting `tool_format`.
        description: Model families that use it.
        syntax: Syntax of calls. None if the format has reasoning only.
        thinking: Markers of reasoning. The first block is the one that the engine opens and closes.
        tokens: Markers that are usually special tokens.
        trims_content: Whether white space before calls belongs to no text.
        trims_reasoning: Whether white space at the end of reasoning, and line breaks behind it, belong to no text.
        triggers: Markers without which no call begins. Empty if calls begin with ordinary text.
        frame: Markers around the answer.
        reasoning_enders: Markers that end reasoning without closing it. They belong to what follows.
        call_ends_reasoning: Whether a well-formed start of a call ends reasoning that was not closed.
        call_ids: How the ids of earlier calls must look in the prompt.
        vocabulary: Markers that are special tokens of this model.
    """

    name: str
    description: str
    syntax: CallSyntax = None
    thinking: tuple[ThinkingBlock, ...] = ()
    tokens: tuple[str, ...] = ()
    trims_content: bool = True
    trims_reasoning: bool = True
    triggers: tuple[str, ...] = ()
    frame: AnswerFrame | None = None
    reasoning_enders: tuple[str, ...] = ()
    call_ends_reasoning: bool = False
    call_ids: Literal["any", "nine_characters", "kimi"] = "any"
    vocabulary: frozenset[str] = frozenset()

    @property
    def has_calls(self) -> bool:
        """Whether the format has tool calls."""
        return self.syntax is not None

    @property
    def has_bare_calls(self) -> bool:
        """Whether calls begin with ordinary text at the start of the answer, so that some answers look like them."""
        match self.syntax:
            case JsonSyntax(open=("", *_)) | PythonSyntax(is_bare=True):
                return True
        return False

    @property
    def reasoning_open(self) -> str:
        """Marker before reasoning, or an empty string."""
        return self.thinking[0].open if self.thinking else ""

    @property
    def reasoning_close(self) -> str:
        """Marker after reasoning, or an empty string."""
        return self.thinking[0].close if self.thinking else ""

    def map_call_id(self, call_id: str, name: str, number: int) -> str:
        """Return the id of an earlier call as the prompt must show it.

        Args:
            call_id: Id that the client sent.
            name: Name of the tool.
            number: Number of the call in the conversation, from 0.
        """
        match self.call_ids:
            case "nine_characters" if _NINE_CHARACTERS.fullmatch(call_id) is None:
                return _hash_id(call_id)
            case "kimi" if _KIMI_ID.fullmatch(call_id) is None:
                return f"functions.{name}:{number}"
        return call_id

    def with_vocabulary(self, has_token: Callable[[str], bool]) -> OutputFormat:
        """Return the format for a model whose vocabulary contains the tokens that `has_token` confirms."""
        return replace(self, vocabulary=frozenset(filter(has_token, self.tokens)))


def _hash_id(call_id: str) -> str:
    """Return nine letters and digits that depend on the id only."""
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest()[:8])
    letters = ""
    for _ in range(_MISTRAL_ID_CHARS):
        number, rest = divmod(number, len(_ID_ALPHABET))
        letters += _ID_ALPHABET[rest]
    return letters
