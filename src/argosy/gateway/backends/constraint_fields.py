"""The constraint of a request's output, in whichever of the known spellings the client sent it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from msgspec import Raw

from argosy.protocol import invalid_request

ConstraintKind = Literal[
    "json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"
]

WHITESPACE_FIELD = "guided_whitespace_pattern"
HINT_FIELDS = frozenset({"guided_decoding_backend"})
"""Fields that choose how a server enforces a constraint. Servers choose well enough by themselves."""
_VLLM_KINDS: dict[str, ConstraintKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Constraint by its key in vLLM's `structured_outputs`. All other keys are options."""
_TOP_LEVEL_KINDS: dict[str, ConstraintKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Constraint by the request field that holds its value: vLLM's old fields, SGLang's and llama.cpp's."""
CONSTRAINT_FIELDS = frozenset(
    {"response_format", "structured_outputs", WHITESPACE_FIELD, *HINT_FIELDS, *_TOP_LEVEL_KINDS}
)
"""All request fields that `read_constraint_fields` reads."""
_UNSET_VALUES = frozenset({b"null", b'""'})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestConstraint:
    """Constraint of a request's output, before any server's spelling."""

    kind: ConstraintKind | None
    """None for a `response_format` that only its server knows."""
    field: str
    """Request field that holds the constraint."""
    value: Any = None
    """A schema, a text or a list of texts, by `kind`."""
    response_format: dict[str, Any] | None = None
    """The client's own `response_format`, if the constraint came from it and has the shape of OpenAI's API."""
    options: Mapping[str, Any]
    """Options in vLLM's spelling, such as `whitespace_pattern`."""


def read_constraint_fields(raw: Mapping[str, Raw]) -> RequestConstraint | None:
    """Return the constraint of a request; None if its output is free.

    Raises:
        ApiError(400): A field is malformed, or two fields constrain the output.
    """
    constraints = [*_read_response_format(raw), *_read_structured_outputs(raw)]
    for field, kind in _TOP_LEVEL_KINDS.items():
        value = _decode(raw, field)
        if value is not None:
            checked = _CHECKS[kind](value, field)
            constraints.append(
                RequestConstraint(kind=kind, field=field, value=checked, options=_options(raw))
            )
    if len(constraints) > 1:
        first, second = constraints[0].field, constraints[1].field
        message = f"'{first}' and '{second}' both constrain the output. Send one of them."
        raise invalid_request(message, second)
    return constraints[0] if constraints else None


def _read_response_format(raw: Mapping[str, Raw]) -> list[RequestConstraint]:
    field = "response_format"
    response_format = _decode(raw, field)
    if response_format is None:
        return []
    _expect(response_format, dict, field)
    constraint = RequestConstraint(
        kind=None, field=field, response_format=response_format, options=_options(raw)
    )
    match response_format.get("type"):
        case "text":
            return []
        case "json_object" if "schema" in response_format:  # llama.cpp's, which OpenAI's API lacks
            schema = _schema(response_format["schema"], f"{field}.schema")
            return [replace(constraint, kind="json_schema", value=schema, response_format=None)]
        case "json_object":
            return [replace(constraint, kind="json_object")]
        case "json_schema":
            schema = _openai_schema(response_format, field)
            return [replace(constraint, kind="json_schema", value=schema)]
        case "structural_tag":
            return [replace(constraint, kind="structural_tag", value=response_format)]
    return [constraint]


def _openai_schema(response_format: Mapping[str, Any], field: str) -> object:
    wrapper = _expect(response_format.get("json_schema"), dict, f"{field}.json_schema")
    return _schema(wrapper.get("schema", {}), f"{field}.json_schema.schema")


def _read_structured_outputs(raw: Mapping[str, Raw]) -> list[RequestConstraint]:
    field = "structured_outputs"
    value = _decode(raw, field)
    if value is None:
        return []
    _expect(value, dict, field)
    options = {name: option for name, option in value.items() if name not in _VLLM_KINDS}
    return [
        RequestConstraint(
            kind=kind,
            field=f"{field}.{name}",
            value=_CHECKS[kind](value[name], f"{field}.{name}"),
            options=_set_options(options) | _options(raw),
        )
        for name, kind in _VLLM_KINDS.items()
        if value.get(name) not in (None, False)
    ]


def _options(raw: Mapping[str, Raw]) -> dict[str, Any]:
    return _set_options({"whitespace_pattern": _decode(raw, WHITESPACE_FIELD)})


def _set_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value not in (None, False)}


# --- values --------------------------------------------------------------------------------------

_TYPE_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}


def _expect(value: Any, type_: type, field: str) -> Any:  # noqa: ANN401 - JSON value
    if not isinstance(value, type_):
        raise invalid_request(f"'{field}' must be {_TYPE_NAMES[type_]}.", field, "invalid_type")
    return value


def _schema(value: object, field: str) -> object:
    """Return a schema, which some clients send as JSON text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid_request(f"'{field}' is not valid JSON. Correct it.", field) from error
    if isinstance(value, bool):
        return {} if value else {"not": {}}
    return _expect(value, dict, field)


def _text(value: object, field: str) -> object:
    return _expect(value, str, field)


def _texts(value: object, field: str) -> object:
    choices = _expect(value, list, field)
    if not choices:
        raise invalid_request(f"'{field}' is empty. Add a choice.", field)
    for index, choice in enumerate(choices):
        _expect(choice, str, f"{field}[{index}]")
    return choices


def _structural_tag(value: object, field: str) -> object:
    """Return a structural tag as an object. vLLM and SGLang send it as JSON text."""
    tag = _expect(_schema(value, field), dict, field)
    return tag if "type" in tag else {"type": "structural_tag", **tag}


def _nothing(value: object, field: str) -> object:  # noqa: ARG001 - signature of the table
    return None


_CHECKS: dict[ConstraintKind, Callable[[object, str], object]] = {
    "json_object": _nothing,
    "json_schema": _schema,
    "regex": _text,
    "choice": _texts,
    "grammar": _text,
    "structural_tag": _structural_tag,
}
"""Function by kind that checks a value and brings it into one shape."""


def _decode(raw: Mapping[str, Raw], field: str) -> Any:  # noqa: ANN401 - JSON value
    """Return a field's value; None if it is missing or empty."""
    encoded = bytes(raw.get(field, Raw(b"null")))
    if encoded in _UNSET_VALUES:
        return None
    try:
        return msgspec.json.decode(encoded)
    except (msgspec.DecodeError, RecursionError) as error:
        message = f"'{field}' is not valid JSON. Correct it."
        raise invalid_request(message, field, "invalid_json") from error
