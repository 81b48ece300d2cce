"""Reads the constraint of an answer from the fields of a request, in the spellings of several servers.

OpenAI: `response_format`. vLLM: `structured_outputs`, and before it `guided_*`. SGLang: `json_schema`, `regex`, `ebnf`
and `structural_tag`. llama.cpp: `json_schema` and `grammar`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from argosy.constraints.grammar_text import choice_grammar, regex_grammar, user_grammar
from argosy.constraints.output_constraint import JsonWhitespace, OutputConstraint
from argosy.constraints.pattern_translator import translate_whitespace_pattern
from argosy.constraints.schema_compiler import ANSWER_WHITESPACE, schema_grammar
from argosy.constraints.schema_errors import invalid_schema, quote
from argosy.constraints.schema_rewrites import close_objects
from argosy.constraints.structural_tags import structural_tag_grammar
from argosy.protocol import ApiError, invalid_request

RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag", "grammar")
KINDS_OF_STRUCTURED_OUTPUTS = (
    "json",
    "json_object",
    "regex",
    "choice",
    "grammar",
    "structural_tag",
)
OPTIONS_OF_STRUCTURED_OUTPUTS = frozenset(
    (
        "whitespace_pattern",
        "disable_any_whitespace",
        "disable_additional_properties",
        "disable_fallback",  # there is one backend
        "_backend",
        "_backend_was_auto",
    )
)


@dataclass(frozen=True, slots=True)
class _Options:
    """Options for JSON answers."""

    whitespace: JsonWhitespace = ANSWER_WHITESPACE
    are_objects_closed: bool = False
    param: str | None = None
    """Field of an option that only JSON answers have."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Field with a constraint."""

    param: str
    compile: Callable[[str], OutputConstraint]
    is_json: bool = False


def read_constraint(fields: Mapping[str, Any]) -> OutputConstraint | None:
    """Return the constraint of a request, or None if the answer is free text.

    Args:
        fields: Decoded fields of the request. None means absent.

    Raises:
        ApiError: 400 naming the field. Two constraints at once are an error too.
    """
    present = {name: value for name, value in fields.items() if value is not None}
    options = _read_options(present)
    sources = [
        *_read_response_format(present, options),
        *_read_structured_outputs(present, options),
        *_read_other_fields(present, options),
    ]
    if len(sources) > 1:
        raise invalid_request(
            f"'{sources[0].param}' and '{sources[1].param}' both constrain the answer. Remove one.",
            sources[1].param,
        )
    if options.param and not any(source.is_json for source in sources):
        raise invalid_request(
            f"'{options.param}' only applies to a JSON answer. Remove it, or constrain the answer to JSON.",
            options.param,
        )
    return sources[0].compile(sources[0].param) if sources else None


def _read_response_format(fields: Mapping[str, Any], options: _Options) -> list[_Source]:
    response_format = fields.get("response_format")
    if response_format is None:
        return []
    if not isinstance(response_format, Mapping):
        raise _wrong_type("response_format", "an object")
    kind = response_format.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        if response_format.get("schema") is not None:
            return [_json_source("response_format.schema", response_format["schema"], options)]
        return [_json_object_source("response_format", options)]
    if kind == "json_schema":
        return [_read_json_schema(response_format, options)]
    if kind == "structural_tag":
        return [
            _Source("response_format", lambda param: structural_tag_grammar(response_format, param))
        ]
    if kind == "grammar":
        text = response_format.get("grammar")
        return [_Source("response_format.grammar", lambda param: user_grammar(text, param))]
    raise invalid_request(
        f"'response_format.type' must be one of {', '.join(RESPONSE_FORMATS)}, not {quote(str(kind))}.",
        "response_format.type",
    )


def _read_json_schema(response_format: Mapping[str, Any], options: _Options) -> _Source:
    wrapper = response_format.get("json_schema")
    if wrapper is None and response_format.get("schema") is not None:
        return _json_source("response_format.schema", response_format["schema"], options)
    if not isinstance(wrapper, Mapping):
        raise _wrong_type("response_format.json_schema", "an object with 'name' and 'schema'")
    strict = wrapper.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise _wrong_type("response_format.json_schema.strict", "true or false")
    param = "response_format.json_schema.schema"
    if wrapper.get("schema") is None:
        raise ApiError(
            400,
            "missing_required_parameter",
            f"'{param}' is missing. Send a JSON schema, or use the type json_object.",
            param=param,
        )
    return _json_source(param, wrapper["schema"], options, strict=bool(strict))


def _read_structured_outputs(fields: Mapping[str, Any], options: _Options) -> list[_Source]:
    outputs = fields.get("structured_outputs")
    if outputs is None:
        return []
    if not isinstance(outputs, Mapping):
        raise _wrong_type("structured_outputs", "an object")
    sources: list[_Source] = []
    for name, value in outputs.items():
        param = f"structured_outputs.{name}"
        if value is None or name in OPTIONS_OF_STRUCTURED_OUTPUTS:
            continue
        if name not in KINDS_OF_STRUCTURED_OUTPUTS:
            raise invalid_request(
                f"'{param}' is not known. Use one of {', '.join(KINDS_OF_STRUCTURED_OUTPUTS)}.",
                param,
                "unknown_parameter",
            )
        if name == "json_object":
            if not isinstance(value, bool):
                raise _wrong_type(param, "true or false")
            sources += [_json_object_source(param, options)] if value else []
        else:
            sources.append(_find_source(name, param, value, options))
    return sources


def _read_other_fields(fields: Mapping[str, Any], options: _Options) -> list[_Source]:
    kinds = {
        "guided_json": "json",
        "guided_regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
        "structural_tag": "structural_tag",
        "json_schema": "json",
        "grammar": "grammar",
        "regex": "regex",
        "ebnf": "grammar",
    }
    return [
        _find_source(kind, field, fields[field], options)
        for field, kind in kinds.items()
        if field in fields
    ]


def _find_source(kind: str, param: str, value: Any, options: _Options) -> _Source:  # noqa: ANN401 - JSON value
    if kind == "json":
        return _json_source(param, value, options)
    compilers = {
        "regex": regex_grammar,
        "choice": choice_grammar,
        "grammar": user_grammar,
        "structural_tag": structural_tag_grammar,
    }
    return _Source(param, lambda field: compilers[kind](value, field))


def _json_source(
    param: str,
    value: Any,  # noqa: ANN401 - JSON value
    options: _Options,
    *,
    strict: bool = False,
    kind: str = "json_schema",
) -> _Source:
    def compile_schema(field: str) -> OutputConstraint:
        schema = decode_schema(value, field)
        if options.are_objects_closed:
            schema = close_objects(schema)
        return schema_grammar(
            schema, strict=strict, param=field, whitespace=options.whitespace, kind=kind
        )

    return _Source(param, compile_schema, is_json=True)


def _json_object_source(param: str, options: _Options) -> _Source:
    return _json_source(param, {"type": "object"}, options, strict=True, kind="json_object")


def decode_schema(value: Any, param: str) -> Any:  # noqa: ANN401 - JSON value
    """Return a schema that may have been sent as JSON text.

    Raises:
        ApiError: 400.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise invalid_schema(f"The text is no JSON document: {error}.", param) from None


def _read_options(fields: Mapping[str, Any]) -> _Options:
    outputs = fields.get("structured_outputs")
    outputs = outputs if isinstance(outputs, Mapping) else {}
    pattern = outputs.get("whitespace_pattern")
    param = "structured_outputs.whitespace_pattern"
    if pattern is None:
        pattern, param = fields.get("guided_whitespace_pattern"), "guided_whitespace_pattern"
    is_compact = _read_flag(outputs, "disable_any_whitespace")
    are_objects_closed = _read_flag(outputs, "disable_additional_properties")
    if pattern is None:
        whitespace = JsonWhitespace(pattern=None) if is_compact else ANSWER_WHITESPACE
        return _Options(whitespace, are_objects_closed)
    if is_compact:
        raise invalid_request(
            f"'{param}' contradicts 'structured_outputs.disable_any_whitespace'. Remove one.", param
        )
    whitespace = JsonWhitespace(pattern=translate_whitespace_pattern(pattern, param))
    return _Options(whitespace, are_objects_closed, param)


def _read_flag(outputs: Mapping[str, Any], name: str) -> bool:
    value = outputs.get(name, False)
    if value is not None and not isinstance(value, bool):
        raise _wrong_type(f"structured_outputs.{name}", "true or false")
    return bool(value)


def _wrong_type(param: str, expected: str) -> ApiError:
    return invalid_request(f"'{param}' must be {expected}.", param, "invalid_type")
