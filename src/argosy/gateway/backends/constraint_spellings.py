"""Spellings of output constraints: the request fields by which each kind of backend gets them.

Taken from the sources of vLLM 0.33, SGLang 0.5, TensorRT-LLM 1, TGI 3, LMDeploy 0.16 and llama.cpp (November 2026). A
kind that a table lacks is refused, because a server that does not know a field may ignore it without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from argosy.gateway.backends.constraint_fields import ConstraintKind, RequestConstraint
from argosy.protocol import invalid_request

Fields = dict[str, Any]
FieldBuilder = Callable[[RequestConstraint], Fields]
_CHAT_PATH = b"/v1/chat/completions"
_REGEX_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()/-]")
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ConstraintSupport:
    """The constraints that one kind of backend enforces."""

    chat: Mapping[ConstraintKind, FieldBuilder] = field(default_factory=dict)
    """Builder of the request fields of a chat, by the kind of the constraint."""
    completion: Mapping[ConstraintKind, FieldBuilder] = field(default_factory=dict)
    """The same for a text completion."""
    own_fields: frozenset[str] = frozenset()
    """Fields that the server itself defines. They pass unchanged."""
    has_own_formats: bool = False
    """Whether a `response_format` of a type that is not OpenAI's passes to the server."""
    supports_options: bool = False
    """Whether the server knows vLLM's options, such as `whitespace_pattern`."""

    def build_fields(
        self, constraint: RequestConstraint, path: bytes, backend: str
    ) -> dict[str, Any] | None:
        """Build the request fields that carry the constraint at this backend.

        Returns:
            The fields, which replace all `CONSTRAINT_FIELDS`; None if the client's own fields pass unchanged.

        Raises:
            ApiError(400): The backend does not enforce such a constraint.
        """
        builders = self.chat if path == _CHAT_PATH else self.completion
        if constraint.field.partition(".")[0] in self.own_fields and (
            self.supports_options or not constraint.options
        ):
            return None
        if constraint.options and not self.supports_options:
            option = next(iter(constraint.options))
            message = f"{backend} servers do not know the option '{option}'. Remove it."
            raise invalid_request(message, constraint.field, "unsupported_parameter")
        if constraint.kind is None and builders and self.has_own_formats:
            return None
        builder = None if constraint.kind is None else builders.get(constraint.kind)
        if builder is None:
            kinds = ", ".join(builders) or "no constraints"
            endpoint = "chats" if path == _CHAT_PATH else "completions"
            message = (
                f"'{constraint.field}' is not supported: the {backend} servers of this model enforce {kinds} in "
                f"{endpoint}. Remove it, or use another model."
            )
            raise invalid_request(message, constraint.field, "unsupported_parameter")
        return builder(constraint)


# --- builders ------------------------------------------------------------------------------------


def _json_text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _openai_json_object(constraint: RequestConstraint) -> Fields:  # noqa: ARG001 - signature of the tables
    return {"response_format": {"type": "json_object"}}


def _openai_json_schema(constraint: RequestConstraint) -> Fields:
    own = constraint.response_format
    schema = {"name": "response", "schema": constraint.value, "strict": True}
    return {"response_format": own or {"type": "json_schema", "json_schema": schema}}


def _openai_structural_tag(constraint: RequestConstraint) -> Fields:
    return {"response_format": constraint.value}


def _vllm(key: str, value: Callable[[RequestConstraint], Any]) -> FieldBuilder:
    def build(constraint: RequestConstraint) -> Fields:
        if constraint.response_format is not None and not constraint.options:
            return {"response_format": constraint.response_format}
        return {"structured_outputs": {key: value(constraint), **constraint.options}}

    return build


def _field(name: str, value: Callable[[RequestConstraint], Any]) -> FieldBuilder:
    return lambda constraint: {name: value(constraint)}


def _format(kind: str, name: str, value: Callable[[RequestConstraint], Any]) -> FieldBuilder:
    return lambda constraint: {"response_format": {"type": kind, name: value(constraint)}}


def _value(constraint: RequestConstraint) -> object:
    return constraint.value


def _value_text(constraint: RequestConstraint) -> object:
    return _json_text(constraint.value)


def _any_object(constraint: RequestConstraint) -> object:  # noqa: ARG001 - signature of the tables
    return _ANY_OBJECT


def _any_object_text(constraint: RequestConstraint) -> object:  # noqa: ARG001 - signature of the tables
    return _json_text(_ANY_OBJECT)


def _true(constraint: RequestConstraint) -> object:  # noqa: ARG001 - signature of the tables
    return True


def _choice_regex(constraint: RequestConstraint) -> object:
    """Return a regular expression for a list of texts. Only special characters are escaped, for any dialect."""
    return "|".join(f"({_REGEX_SPECIAL.sub(_escape, choice)})" for choice in constraint.value)


def _escape(match: re.Match[str]) -> str:
    return "\\" + match[0]


def _choice_gbnf(constraint: RequestConstraint) -> object:
    """Return a llama.cpp grammar for a list of texts."""
    return "root ::= " + " | ".join(map(_gbnf_literal, constraint.value))


def _gbnf_literal(text: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'


# --- tables --------------------------------------------------------------------------------------

_VLLM: dict[ConstraintKind, FieldBuilder] = {
    "json_object": _vllm("json_object", _true),
    "json_schema": _vllm("json", _value),
    "regex": _vllm("regex", _value),
    "choice": _vllm("choice", _value),
    "grammar": _vllm("grammar", _value),
    "structural_tag": _vllm("structural_tag", _value_text),
}
_SGLANG: dict[ConstraintKind, FieldBuilder] = {
    "regex": _field("regex", _value),
    "choice": _field("regex", _choice_regex),
    "grammar": _field("ebnf", _value),
    "structural_tag": _openai_structural_tag,
}
_TENSORRT_LLM: dict[ConstraintKind, FieldBuilder] = {
    "json_object": _openai_json_object,
    # Some versions take OpenAI's wrapper around the schema for the schema itself, none of them this type.
    "json_schema": _format("json", "schema", _value),
    "regex": _format("regex", "regex", _value),
    "choice": _format("regex", "regex", _choice_regex),
    "grammar": _format("ebnf", "ebnf", _value),
    "structural_tag": _openai_structural_tag,
}
_LLAMA_CPP: dict[ConstraintKind, FieldBuilder] = {
    "json_object": _field("json_schema", _any_object),
    "json_schema": _field("json_schema", _value),
    "choice": _field("grammar", _choice_gbnf),
    "grammar": _field("grammar", _value),
}
CONSTRAINT_SUPPORT: Mapping[str, ConstraintSupport] = MappingProxyType(
    {
        "vllm": ConstraintSupport(
            chat=_VLLM,
            completion=_VLLM,
            own_fields=frozenset({"structured_outputs"}),
            has_own_formats=True,
            supports_options=True,
        ),
        "sglang": ConstraintSupport(
            chat=_SGLANG | {"json_object": _openai_json_object, "json_schema": _openai_json_schema},
            completion=_SGLANG
            | {
                "json_object": _field("json_schema", _any_object_text),
                "json_schema": _field("json_schema", _value_text),
            },
            own_fields=frozenset({"regex", "ebnf"}),
            has_own_formats=True,
        ),
        "tensorrt-llm": ConstraintSupport(
            chat=_TENSORRT_LLM, completion=_TENSORRT_LLM, has_own_formats=True
        ),
        "tgi": ConstraintSupport(
            chat={
                "json_object": _format("json", "value", _any_object),
                "json_schema": _format("json", "value", _value),
                "regex": _format("regex", "value", _value),
                "choice": _format("regex", "value", _choice_regex),
            },
            has_own_formats=True,
        ),
        "lmdeploy": ConstraintSupport(
            chat={
                "json_object": _openai_json_object,
                "json_schema": _openai_json_schema,
                "regex": _format("regex_schema", "regex_schema", _value),
                "choice": _format("regex_schema", "regex_schema", _choice_regex),
            },
            has_own_formats=True,
        ),
        "llama.cpp": ConstraintSupport(
            chat=_LLAMA_CPP,
            completion=_LLAMA_CPP,
            own_fields=frozenset({"grammar", "json_schema"}),
            has_own_formats=True,
        ),
        "openai": ConstraintSupport(
            chat={"json_object": _openai_json_object, "json_schema": _openai_json_schema},
            completion={"json_object": _openai_json_object, "json_schema": _openai_json_schema},
            own_fields=frozenset({"response_format"}),
            has_own_formats=True,
        ),
    }
)
"""Constraints by the kind of backend. Native replicas and servers of unknown kind get the client's own fields."""
