"""Prompt templates: what they render to beside plain Jinja, hostile ones, bounds, and where variables should stand."""

from __future__ import annotations

from typing import Any

import jinja2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy.prompts import CompiledPrompt, PromptContent, PromptError, PromptMessage

BIG = "a" * 200_000
VALUES: dict[str, Any] = {"x": "text", "n": 3, "xs": ["a", "b"], "d": {"k": "v"}, "big": [BIG] * 60}


def render(source: str, variables: dict[str, Any] | None = None) -> str:
    """Render a text with those of the variables that it uses."""
    prompt = CompiledPrompt(PromptContent(text=source))
    given = VALUES if variables is None else variables
    text = prompt.render({name: given[name] for name in prompt.variables & given.keys()}).text
    assert text is not None
    return text


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ ''.__class__.__mro__ }}", "has no attribute"),
        ("{{ x['__class__'] }}", "has no"),
        ("{{ d.items }}", "has no attribute 'items'"),
        ("{{ loop.__class__ }}", "'loop' is reserved"),
        ("{% for a in xs %}{{ loop._iterable }}{% endfor %}", "'loop' is reserved"),
        ("{% for a in xs %}{{ loop }}{% endfor %}", "'loop' is reserved"),
        ("{{ _budget }}", "'_budget' is reserved"),
        ("{% for _budget in xs %}{% endfor %}", "'_budget' is reserved"),
        ("{{ x.upper() }}", "'call' is not allowed"),
        ("{{ range(999999999) }}", "'call' is not allowed"),
        ("{{ lipsum(n=2000) }}", "'call' is not allowed"),
        ("{{ cycler }}", "'cycler' is undefined"),
        ("{{ 'a' * 50000000 }}", "'mul' is not allowed"),
        ("{{ 'a' ~ x ~ x }}", "'concat' is not allowed"),
        ("{{ x + x }}", "'add' is not allowed"),
        ("{{ '%9999999s' % x }}", "'mod' is not allowed"),
        ("{{ n ** n }}", "'pow' is not allowed"),
        ("{{ x | center(40000000) }}", "'center' is unknown"),
        ("{{ x | attr('upper') }}", "'attr' is unknown"),
        ("{{ xs | join(x, 'a') }}", "at most one argument"),
        ("{{ xs | map('upper') }}", "'map' is unknown"),
        ("{% set y = x %}", "'assign' is not allowed"),
        ("{% macro m() %}{% endmacro %}", "'macro' is not allowed"),
        ("{% include 'x' %}", "'include' is not allowed"),
        ("{% extends 'x' %}", "'extends' is not allowed"),
        ("{% block b %}{% endblock %}", "'block' is not allowed"),
        ("{% for a in xs recursive %}{% endfor %}", "recursive"),
        ("{% for a in xs %}" * 5 + "{% endfor %}" * 5, "nested"),
        ("(" * 9 + "{{ " + "(" * 30_000, "nested too deeply|unexpected"),
        ("{{ x" + ".a" * 500 + " }}", "nested"),
        ("{{ " + "not " * 3_000 + "x }}", "nested"),
        ("{{ x }}" * 2_001, "expressions"),
        ("{{ " + "9" * 5_000 + " }}", "too large a number"),
        ("{{ -n }}", "arithmetic is not allowed"),
        ("{{ x", "line 1"),
        ("{% endraw %}", "line 1"),
        ("x" * 65_537, "65,536 characters"),
        ("{{ xs }}", "a list is no text"),
        ("{{ d }}", "a mapping is no text"),
        ("{{ missing }}", "'missing' is undefined"),
        ("{{ d.missing }}", "no attribute 'missing'"),
        ("{{ xs[9] }}", "no element 9"),
        ("{{ missing | tojson }}", "'missing' is undefined"),
        ("{{ [missing] | first }}", "'missing' is undefined"),
        ("{{ '\\ud800' }}", "line 1: constants are texts of whole characters"),
        ("{{ -1e400 }}", "finite numbers"),
        ("{{ xs[::0] | length }}", "a value does not fit: slice step"),
        ("{% for a, b in [[1]] %}{% endfor %}", "a value does not fit: not enough values"),
        ("{% for a in x %}{% endfor %}", "needs a list"),
        ("{{ big | join(big[0]) }}", "too (many steps|long)"),
        (
            "{% for a in big %}{% for b in big %}{% for c in big %}{{ a }}{% endfor %}{% endfor %}{% endfor %}",
            ".",
        ),
        ("{% for a in big %}{{ a | upper }}{% endfor %}", "more than 1,048,576 characters"),
        ("{% for a in big %}{% if a | lower == a %}{% endif %}{% endfor %}", "too many steps"),
        ("{% for a in big %}{% if a in big %}{% endif %}{% endfor %}", "too many steps"),
        ("{% for a in big %}" + "x" * 60_000 + "{% endfor %}", "more than 1,048,576 characters"),
    ],
)
def test_hostile_and_wrong_templates_are_refused(source: str, problem: str) -> None:
    with pytest.raises(PromptError, match=problem):
        render(source)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({}, "a text or messages"),
        ({"text": "x", "messages": [{"role": "user", "content": "x"}]}, "not both"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]: it needs a role and a content"),
        ({"messages": [{"placeholder": "h", "role": "user"}]}, "a placeholder alone"),
        ({"text": "x", "parameters": {"stream": True}}, "'stream' is unknown"),
        ({"text": "{{ messages }}"}, "'messages' is that of the request"),
    ],
)
def test_wrong_contents_are_refused(content: dict[str, Any], problem: str) -> None:
    with pytest.raises(PromptError, match=problem):
        CompiledPrompt(msgspec.convert(content, PromptContent))


def test_values_are_never_templates() -> None:
    hostile = "{{ 7*7 }}{% endraw %}{% for a in xs %}{# #}"
    assert (
        render("<{{ x }}|{% raw %}{{ x }}{% endraw %}>", {"x": hostile})
        == f"<{hostile}|{{{{ x }}}}>"
    )


NAMES = st.sampled_from(
    ["x", "n", "flag", "d.k", "xs[0]", "xs | length", "x | upper", "xs | join(', ')"]
)
TEXTS = st.text("ab \n<{", max_size=6).filter(lambda text: "{" not in text)
CONDITIONS = st.sampled_from(
    ["flag", "n > 2", "not flag", "x == 'text'", "x in xs", "y is defined"]
)
TEMPLATES = st.recursive(
    TEXTS | NAMES.map("{{{{ {} }}}}".format),
    lambda inner: (
        st.lists(inner, max_size=3).map("".join)
        | st.builds("{{% if {} %}}{}{{% else %}}{}{{% endif %}}".format, CONDITIONS, inner, inner)
        | inner.map(
            "{{% for item in xs %}}{{{{ loop.index }}}}{{{{ item }}}}{}{{% endfor %}}".format
        )
    ),
    max_leaves=8,
)


@given(
    TEMPLATES,
    st.fixed_dictionaries(
        {
            "x": st.text(),
            "n": st.integers(-5, 5),
            "xs": st.lists(st.text(max_size=4), min_size=1, max_size=4),
        }
    ),
)
def test_allowed_templates_render_as_in_jinja(source: str, variables: dict[str, Any]) -> None:
    everything = variables | {"flag": variables["n"] > 0, "d": {"k": "v"}}
    plain = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - the output is no HTML
        finalize=lambda value: str(value).lower() if isinstance(value, bool) else value,
    )
    assert render(source, everything) == plain.from_string(source).render(everything)


def test_messages_of_requests_stand_at_their_place_or_at_the_end() -> None:
    system = PromptMessage(role="system", content="Help {{ x }}.")
    history, own = (PromptMessage(placeholder=name) for name in ("history", "messages"))
    past, new = {"role": "user", "content": "{{ x }}"}, {"role": "user", "content": "now"}
    rendered = {"role": "system", "content": "Help Jo."}
    variables = {"x": "Jo", "history": [past]}
    for messages, expected in (
        ((system, history), [rendered, past, new]),
        ((own, history, system), [new, past, rendered]),
    ):
        prompt = CompiledPrompt(PromptContent(messages=messages))
        assert prompt.variables == {"x", "history"}
        assert prompt.render(variables, [new]).messages == expected
    for wrong, problem in (
        ({"x": "Jo"}, "must be a list of messages"),
        (variables | {"history": ["text"]}, "must be a list of messages"),
        (variables | {"y": 1}, "no variable 'y'. It has: history, x"),
    ):
        with pytest.raises(PromptError, match=problem):
            prompt.render(wrong, [new])


@pytest.mark.parametrize(
    ("source", "warns"),
    [
        ("Fixed " * 20 + "{{ x }}", False),
        ("{{ x }}" + "Fixed " * 20, True),
        ("{{ x }}" + "Fixed", False),
        ("{% if n > 1 %}a{% endif %}" + "Fixed " * 20, True),
    ],
)
def test_variables_before_much_fixed_text_are_named(source: str, warns: bool) -> None:
    warnings = CompiledPrompt(PromptContent(text=source)).warnings
    assert bool(warnings) == warns
    assert not warns or warnings[0].startswith("text line 1 (")
