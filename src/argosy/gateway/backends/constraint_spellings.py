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
        if constraint.kind is None and builders:  # a `response_format` that only its server knows
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


def _openai_json_object(_: RequestConstraint) -> Fields:
    return {"response_format": {"type": "json_object"}}


def _openai_json_schema(constraint: RequestConstraint) -> Fields:
    own = constraint.response_format
    schema = {"name": "response", "schema": constraint.value, "strict": True}
    return {"response_format": own or {"type": "json_schema", "json_schema": schema}}


def _openai_structural_tag(constraint: RequestConstraint) -> Fields:
    return {"response_format": constraint.value}


def _value(constraint: RequestConstraint) -> object:
    return constraint.value


def _vllm(key: str, value: Callable[[RequestConstraint], Any] = _value) -> FieldBuilder:
    def build(constraint: RequestConstraint) -> Fields:
        if constraint.response_format is not None and not constraint.options:
            return {"response_format": constraint.response_format}
        return {"structured_outputs": {key: value(constraint), **constraint.options}}

    return build


def _value_text(constraint: RequestConstraint) -> object:
    return _json_text(constraint.value)


def _field(name: str, value: Callable[[RequestConstraint], Any] = _value) -> FieldBuilder:
    return lambda constraint: {name: value(constraint)}


def _format(
    kind: str, name: str, value: Callable[[RequestConstraint], Any] = _value
) -> FieldBuilder:
    return lambda constraint: {"response_format": {"type": kind, name: value(constraint)}}


def _choice_regex(constraint: RequestConstraint) -> object:
    """Return a regular expression for a list of texts. Only special characters are escaped, for any dialect."""
    escaped = (_REGEX_SPECIAL.sub(r"\\\g<0>", choice) for choice in constraint.value)
    return "|".join(f"({choice})" for choice in escaped)


def _choice_gbnf(constraint: RequestConstraint) -> object:
    """Return a llama.cpp grammar for a list of texts."""
    return "root ::= " + " | ".join(map(_gbnf_literal, constraint.value))


def _gbnf_literal(text: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'


# --- tables --------------------------------------------------------------------------------------

_VLLM: dict[ConstraintKind, FieldBuilder] = {
    "json_object": _vllm("json_object", lambda _: True),
    "json_schema": _vllm("json"),
    "regex": _vllm("regex"),
    "choice": _vllm("choice"),
    "grammar": _vllm("grammar"),
    "structural_tag": _vllm("structural_tag", _value_text),
}
_SGLANG: dict[ConstraintKind, FieldBuilder] = {
    "regex": _field("regex"),
    "choice": _field("regex", _choice_regex),
    "grammar": _field("ebnf"),
    "structural_tag": _openai_structural_tag,
}
_TENSORRT_LLM: dict[ConstraintKind, FieldBuilder] = {
    "json_object": _openai_json_object,
    # Some versions take OpenAI's wrapper around the schema for the schema itself, none of them this type.
    "json_schema": _format("json", "schema"),
    "regex": _format("regex", "regex"),
    "choice": _format("regex", "regex", _choice_regex),
    "grammar": _format("ebnf", "ebnf"),
    "structural_tag": _openai_structural_tag,
}
_LLAMA_CPP: dict[ConstraintKind, FieldBuilder] = {
    "json_object": _field("json_schema", lambda _: _ANY_OBJECT),
    "json_schema": _field("json_schema"),
    "choice": _field("grammar", _choice_gbnf),
    "grammar": _field("grammar"),
}
CONSTRAINT_SUPPORT: Mapping[str, ConstraintSupport] = MappingProxyType(
    {
        "vllm": ConstraintSupport(
            chat=_VLLM,
            completion=_VLLM,
            own_fields=frozenset({"structured_outputs"}),
            supports_options=True,
        ),
        "sglang": ConstraintSupport(
            chat=_SGLANG | {"json_object": _openai_json_object, "json_schema": _openai_json_schema},
            completion=_SGLANG
            | {
                "json_object": _field("json_schema", lambda _: _json_text(_ANY_OBJECT)),
                "json_schema": _field("json_schema", _value_text),
            },
            own_fields=frozenset({"regex", "ebnf"}),
        ),
        "tensorrt-llm": ConstraintSupport(chat=_TENSORRT_LLM, completion=_TENSORRT_LLM),
        "tgi": ConstraintSupport(
            chat={
                "json_object": _format("json", "value", lambda _: _ANY_OBJECT),
                "json_schema": _format("json", "value"),
                "regex": _format("regex", "value"),
                "choice": _format("regex", "value", _choice_regex),
            },
        ),
        "lmdeploy": ConstraintSupport(
            chat={
                "json_object": _openai_json_object,
                "json_schema": _openai_json_schema,
                "regex": _format("regex_schema", "regex_schema"),
                "choice": _format("regex_schema", "regex_schema", _choice_regex),
            },
        ),
        "llama.cpp": ConstraintSupport(
            chat=_LLAMA_CPP,
            completion=_LLAMA_CPP,
            own_fields=frozenset({"grammar", "json_schema"}),
        ),
        "openai": ConstraintSupport(
            chat={"json_object": _openai_json_object, "json_schema": _openai_json_schema},
            completion={"json_object": _openai_json_object, "json_schema": _openai_json_schema},
            own_fields=frozenset({"response_format"}),
        ),
    }
)
"""Constraints by the kind of backend. Native replicas and servers of unknown kind get the client's own fields."""
