"""Compiles structural tags of vLLM and SGLang: free text with constrained passages.

Two forms exist: `structures` with `triggers`, and `format`, a tree of elements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from argosy.constraints.grammar_text import compile_grammars, regex_terminal, rewrite_user_grammar
from argosy.constraints.limits import MAX_SCHEMA_DEPTH
from argosy.constraints.output_constraint import OutputConstraint
from argosy.constraints.schema_compiler import schema_grammar
from argosy.constraints.schema_errors import invalid_grammar, quote
from argosy.protocol import ApiError

ANY_TEXT = "(?s:.*)"
MAX_ELEMENTS = 500


def structural_tag_grammar(
    tag: Any,  # noqa: ANN401 - JSON value
    param: str,
    name: str = "answer",
) -> OutputConstraint:
    """Compile a structural tag, sent as an object or as JSON text.

    Raises:
        ApiError: 400 naming the element.
    """
    if isinstance(tag, str):
        try:
            tag = json.loads(tag)
        except (ValueError, RecursionError) as error:
            raise invalid_grammar(f"The text is no JSON document: {error}.", param) from None
    if not isinstance(tag, Mapping):
        raise invalid_grammar("The structural tag must be an object.", param)
    builder = _GrammarBuilder(param, name)
    if "structures" in tag:
        start = builder.add_structures(tag)
    elif "format" in tag:
        start = builder.add_element(tag["format"], "format", 0)
    else:
        raise invalid_grammar(
            "The structural tag needs 'format', or 'structures' and 'triggers'.", param
        )
    lark = "\n".join([f"start: {start}", *builder.rules])
    return compile_grammars(
        "structural_tag", ({"name": name, "lark_grammar": lark}, *builder.grammars), param
    )


class _GrammarBuilder:
    """Adds rules for the elements of one structural tag."""

    def __init__(self, param: str, name: str) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._param = param
        self._name = name
        self._elements: dict[str, Callable[[Mapping[str, Any], str, int], str]] = {
            "const_string": self._add_constant,
            "json_schema": self._add_schema,
            "regex": self._add_regex,
            "grammar": self._add_grammar,
            "any_text": self._add_text,
            "sequence": self._add_sequence,
            "or": self._add_alternatives,
            "tag": self._add_tag,
            "triggered_tags": self._add_triggered_tags,
            "tags_with_separator": self._add_separated_tags,
        }

    def add_structures(self, tag: Mapping[str, Any]) -> str:
        """Add the older form: every structure is a tag with a JSON schema."""
        structures = self._read_list(tag, "structures", "")
        tags = []
        for position, structure in enumerate(structures):
            if not isinstance(structure, Mapping):
                raise self._error(f"structures[{position}]", "must be an object")
            content = {"type": "json_schema", "json_schema": structure.get("schema")}
            tags.append({**structure, "type": "tag", "content": content})
        element = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
        return self._add_triggered_tags(element, "structures", 0)

    def add_element(self, element: Any, place: str, depth: int) -> str:  # noqa: ANN401 - JSON value
        """Add an element and return the name of its rule."""
        if not isinstance(element, Mapping):
            raise self._error(place, "must be an object with 'type'")
        if depth > MAX_SCHEMA_DEPTH or len(self.rules) > MAX_ELEMENTS:
            raise self._error(
                place,
                f"is nested more than {MAX_SCHEMA_DEPTH} deep, or has more than {MAX_ELEMENTS} elements before it",
            )
        add = self._elements.get(str(element.get("type")))
        if add is None:
            raise self._error(
                f"{place}.type",
                f"must be one of {', '.join(self._elements)}, not {quote(str(element.get('type')))}",
            )
        return add(element, place, depth)

    def _add_constant(self, element: Mapping[str, Any], place: str, _depth: int) -> str:
        return self._add_rule(_quote(self._read_text(element, "value", place)))

    def _add_schema(self, element: Mapping[str, Any], place: str, _depth: int) -> str:
        schema = element.get("json_schema")
        constraint = schema_grammar(
            schema, strict=True, param=f"{self._param}.{place}.json_schema", name=self._new_name()
        )
        return self._add_grammars(constraint.grammars)

    def _add_regex(self, element: Mapping[str, Any], place: str, _depth: int) -> str:
        return self._add_rule(
            regex_terminal(element.get("pattern"), f"{self._param}.{place}.pattern")
        )

    def _add_grammar(self, element: Mapping[str, Any], place: str, _depth: int) -> str:
        param = f"{self._param}.{place}.grammar"
        return self._add_grammars(
            rewrite_user_grammar(element.get("grammar"), param, self._new_name())
        )

    def _add_grammars(self, grammars: tuple[dict[str, Any], ...]) -> str:
        self.grammars.extend(grammars)
        return self._add_rule(f"@{grammars[0]['name']}")

    def _add_text(self, element: Mapping[str, Any], place: str, _depth: int) -> str:
        excluded = self._read_texts(element, "excludes", place) if element.get("excludes") else []
        return self._add_rule(self._add_text_without(excluded))

    def _add_sequence(self, element: Mapping[str, Any], place: str, depth: int) -> str:
        return self._add_rule(" ".join(self._add_elements(element, "elements", place, depth)))

    def _add_alternatives(self, element: Mapping[str, Any], place: str, depth: int) -> str:
        return self._add_rule(" | ".join(self._add_elements(element, "elements", place, depth)))

    def _add_elements(
        self, element: Mapping[str, Any], key: str, place: str, depth: int
    ) -> list[str]:
        return [
            self.add_element(child, f"{place}.{key}[{position}]", depth + 1)
            for position, child in enumerate(self._read_list(element, key, place))
        ]

    def _add_tag(self, element: Mapping[str, Any], place: str, depth: int) -> str:
        begin = self._read_text(element, "begin", place)
        return self._add_rule(f"{_quote(begin)} {self._add_content(element, place, depth)}")

    def _add_content(self, element: Mapping[str, Any], place: str, depth: int) -> str:
        """Add the content of a tag with its end. Free text ends at the first end."""
        ends = element.get("end", "")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or any(not isinstance(end, str) for end in ends):
            raise self._error(f"{place}.end", "must be a string or a list of strings")
        content = element.get("content")
        if isinstance(content, Mapping) and content.get("type") == "any_text" and all(ends):
            text = self._add_text_without(ends)
            return self._add_rule(" | ".join(self._add_lazy(text, end) for end in ends))
        alternatives = " | ".join(_quote(end) for end in ends)
        rule = self.add_element(content, f"{place}.content", depth + 1)
        return self._add_rule(f"{rule} ({alternatives})")

    def _add_triggered_tags(self, element: Mapping[str, Any], place: str, depth: int) -> str:
        triggers = self._read_texts(element, "triggers", place)
        tags = self._read_list(element, "tags", place)
        alternatives: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for position, tag in enumerate(tags):
            where = f"{place}.tags[{position}]" if place != "structures" else f"{place}[{position}]"
            if not isinstance(tag, Mapping):
                raise self._error(where, "must be an object")
            begin = self._read_text(tag, "begin", where)
            trigger = next((text for text in triggers if begin.startswith(text)), None)
            if trigger is None:
                raise self._error(f"{where}.begin", "must start with one of the triggers")
            content = self._add_content(tag, where, depth)
            rest = begin[len(trigger) :]
            alternatives[trigger].append(f"{_quote(rest)} {content}" if rest else content)
        text = self._add_text_without(
            [
                *triggers,
                *(self._read_texts(element, "excludes", place) if element.get("excludes") else []),
            ]
        )
        tag_rule = self._add_rule(
            " | ".join(
                f"{self._add_lazy(text, trigger)} ({' | '.join(bodies)})"
                for trigger, bodies in alternatives.items()
                if bodies
            )
        )
        repetition = _repetition(element)
        return self._add_rule(
            f"{tag_rule}{repetition}"
            if element.get("stop_after_first")
            else f"{tag_rule}{repetition} {text}"
        )

    def _add_separated_tags(self, element: Mapping[str, Any], place: str, depth: int) -> str:
        tags = self._add_rule(" | ".join(self._add_elements(element, "tags", place, depth)))
        separator = element.get("separator", "")
        if not isinstance(separator, str):
            raise self._error(f"{place}.separator", "must be a string")
        following = "" if element.get("stop_after_first") else f" ({_quote(separator)} {tags})*"
        rule = self._add_rule(f"{tags}{following}")
        return rule if element.get("at_least_one") else self._add_rule(f"{rule}?")

    def _add_text_without(self, excluded: list[str]) -> str:
        """Add a terminal for text that contains none of some texts."""
        name = f"TEXT{len(self.rules)}"
        forbidden = "|".join(_escape_regex(text) for text in dict.fromkeys(excluded))
        body = f"/{ANY_TEXT}/ & ~/(?s:.*)({forbidden})(?s:.*)/" if forbidden else f"/{ANY_TEXT}/"
        self.rules.append(f"{name}: {body}")
        return name

    def _add_lazy(self, text: str, end: str) -> str:
        """Add text that ends at the first occurrence of `end`."""
        name = f"until{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {text} {_quote(end)}")
        return name

    def _add_rule(self, body: str) -> str:
        name = f"element{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _new_name(self) -> str:
        return f"{self._name}_part{len(self.grammars)}"

    def _read_list(self, element: Mapping[str, Any], key: str, place: str) -> list[Any]:
        value = element.get(key)
        if not isinstance(value, list) or not value:
            raise self._error(f"{place}.{key}".lstrip("."), "must be a list with at least one item")
        if len(value) > MAX_ELEMENTS:
            raise self._error(f"{place}.{key}".lstrip("."), f"has more than {MAX_ELEMENTS} items")
        return value

    def _read_texts(self, element: Mapping[str, Any], key: str, place: str) -> list[str]:
        texts = self._read_list(element, key, place)
        if any(not isinstance(text, str) or not text for text in texts):
            raise self._error(f"{place}.{key}", "must be a list of texts that are not empty")
        return texts

    def _read_text(self, element: Mapping[str, Any], key: str, place: str) -> str:
        value = element.get(key)
        if not isinstance(value, str):
            raise self._error(f"{place}.{key}", "must be a string")
        return value

    def _error(self, place: str, problem: str) -> ApiError:
        return invalid_grammar(f"'{place}' {problem}.", self._param)


def _repetition(element: Mapping[str, Any]) -> str:
    if element.get("stop_after_first"):
        return "" if element.get("at_least_one") else "?"
    return "+" if element.get("at_least_one") else "*"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escape_regex(text: str) -> str:
    return re.sub(r"[^0-9A-Za-z]", lambda match: f"\\x{{{ord(match[0]):X}}}", text)
