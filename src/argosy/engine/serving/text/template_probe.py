"""Probe of a chat template: finds what it takes by rendering conversations whose words must appear in the prompt.

A template is a program of the model's author. It may lose a system message without an error, or refuse a second one.
The conversations are constant and few, and each renders within the bounds of every prompt.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from argosy.engine.serving.text.message_forms import adapt_messages
from argosy.engine.serving.text.template_capabilities import (
    LATER_SYSTEM,
    REASONING_NAMES,
    TOOL_DEFAULTS,
    ArgumentsForm,
    CallContent,
    Content,
    ContentForm,
    Extent,
    Message,
    SystemPlace,
    TemplateCapabilities,
    parts_of,
)

Tools = Sequence[Mapping[str, Any]]
RenderProbe = Callable[[Sequence[Message], Tools, Mapping[str, Any]], str]
"""Renders messages with tools and variables. Returns an empty text if the template fails."""

_WORDS = ("wobrek", "snivta", "mulqor", "traxil", "yaflep", "dorvik", "blenzu", "chofit", "krewal")
"""Texts of the probes, which no template contains."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "grunzo",
        "description": "Probe",
        "parameters": {
            "type": "object",
            "properties": {"pleckon": {"type": "string", "description": "Word"}},
            "required": ["pleckon"],
        },
    },
}
_PART_LEAK = re.compile(rf"""['"]text['"]: ?['"](?:{"|".join(_WORDS)})""")
"""A list of parts that the template printed as it is, instead of reading the parts."""
_MAPPING_LEAK = "{'pleckon': "
"""Arguments that the template printed as Python does."""


def probe_template(
    render: RenderProbe,
    variables: Sequence[str] = (),
    *,
    reads_calls: bool = True,
    with_tools: bool = False,
) -> TemplateCapabilities:
    """Find what a template takes.

    Args:
        render: Renders a conversation with the template.
        variables: Variables for reasoning that the template may read.
        reads_calls: Whether the template may read the calls of a message.
        with_tools: Render the conversations as those of requests with tools.
    """
    probe = _Probe(render, (_TOOL,) if with_tools else ())
    return probe.run(variables, reads_calls=reads_calls)


class _Probe:
    """Renders conversations with one template, in the forms found so far."""

    def __init__(self, render: RenderProbe, tools: Tools) -> None:
        self._render = render
        self._tools = tools
        self._can = TemplateCapabilities()
        """Capabilities found so far. The rest is assumed."""

    def run(self, variables: Sequence[str], *, reads_calls: bool) -> TemplateCapabilities:
        a, b, c, d, e, *_ = _WORDS
        self._find_content_form("user", lambda message: [message])
        if not self._shows([_user(a)]):
            return TemplateCapabilities(named=frozenset(), shows_every_message=False)
        self._find_content_form("assistant", lambda message: [_user(c), message, _user(d)])
        self._find_content_form("system", lambda message: [message, _user(c)])
        self._find_content_form(
            LATER_SYSTEM, lambda message: [_system(d), _user(c), {**message, "role": "system"}]
        )
        self._find_order()
        names = {
            "system": [{**_system(a), "name": e}, _user(b)],
            "user": [{**_user(a), "name": e}],
            "assistant": [_user(a), {**_assistant(b), "name": e}, _user(c)],
        }
        self._can = replace(
            self._can,
            named=frozenset(role for role in names if e in self._try(names[role])),
            needed_tool_fields=self._find_needed_tool_fields(),
            variables=frozenset(filter(self._reads, variables)),
        )
        self._find_calls(list(_call_forms(self._can)) if reads_calls else [])
        self._can = replace(self._can, reasoning=self._find_reasoning())
        return replace(
            self._can, shows_every_message=all(map(self._shows_adapted, _ordinary(self._can)))
        )

    # --- rendering -------------------------------------------------------------------------------

    def _try(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """Render messages whose content is in the form of their role, as far as it is found."""
        forms = replace(_AS_SENT, content=self._can.content, call_content=self._can.call_content)
        return self._render(adapt_messages(messages, forms), self._tools, variables or {})

    def _shows(self, messages: Sequence[Message]) -> bool:
        """Return whether each word of the messages is in the prompt."""
        return _has_words(self._try(messages), messages)

    def _shows_adapted(self, messages: Sequence[Message]) -> bool:
        """Return whether each word is in the prompt if the messages are adapted as those of a request."""
        prompt = self._render(adapt_messages(messages, self._can), self._tools, {})
        return _has_words(prompt, messages)

    # --- findings --------------------------------------------------------------------------------

    def _find_content_form(
        self, role: str, within: Callable[[Message], list[Message]], **fields: str
    ) -> None:
        a, b, *_ = _WORDS

        def takes(content: Content) -> bool:
            content_form: ContentForm = "any"
            self._can = replace(self._can, content={**self._can.content, role: content_form})
            messages = within({"role": role, "content": content, **fields})
            prompt = self._try(messages)
            return _has_words(prompt, messages) and not _PART_LEAK.search(prompt)

        takes_text, takes_parts = takes(a), takes([*parts_of(a), *parts_of(b)])
        form: ContentForm = "text"
        if takes_parts:
            form = "any" if takes_text else "parts"
        elif not takes_text and takes(parts_of(a)):
            form = "part"
        self._can = replace(self._can, content={**self._can.content, role: form})

    def _find_order(self) -> None:
        """Find which role may follow which."""
        a, b, c, d, e, *_ = _WORDS
        late_systems = {
            "user": ([_user(a), _system(b)], [_system(a), _user(b), _system(c), _assistant(d)]),
            "assistant": (
                [_user(a), _assistant(b), _system(c), _user(d)],
                [_system(e), _user(a), _assistant(b), _system(c), _user(d)],
            ),
        }
        repeats = {
            "user": [_user(a), _user(b)],
            "assistant": [_user(a), _assistant(b), _assistant(c), _user(d)],
        }
        welcomes = {
            "first": [_assistant(a), _user(b)],
            "after system": [_system(c), _assistant(a), _user(b)],
        }
        self._can = replace(
            self._can,
            system=self._find_system_place(),
            late_system=frozenset(
                role for role in late_systems if all(map(self._shows, late_systems[role]))
            ),
            repeatable=frozenset(name for name in repeats if self._shows(repeats[name])),
            welcome=frozenset(name for name in welcomes if self._shows(welcomes[name])),
            takes_system_alone=self._shows([_system(a)]),
        )

    def _find_system_place(self) -> SystemPlace:
        a, b, c, *_ = _WORDS
        if not self._shows([_system(a), _user(b)]):
            return "none"
        return "several" if self._shows([_system(a), _system(b), _user(c)]) else "one"

    def _find_needed_tool_fields(self) -> tuple[str, ...]:
        """Return the fewest optional fields with which the template shows a function."""
        messages = adapt_messages([_user(_WORDS[0])], self._can)
        choices = (itertools.combinations(TOOL_DEFAULTS, n) for n in range(len(TOOL_DEFAULTS) + 1))
        for names in itertools.chain.from_iterable(choices):
            function = {"name": "grunzo", **{name: TOOL_DEFAULTS[name] for name in names}}
            if "grunzo" in self._render(messages, [{"type": "function", "function": function}], {}):
                return names
        return ()

    def _find_calls(self, forms: Sequence[TemplateCapabilities]) -> None:
        """Find the first form in which the template takes calls, or that it takes none."""
        a, b, c, *_ = _WORDS
        found, leaking = self._can, None
        for form in forms:
            self._can = form
            prompt = self._try(turn := _turn(form))
            if not _has_words(prompt, turn) or (form.call_content == "none" and "None" in prompt):
                continue
            if _MAPPING_LEAK not in prompt:
                break
            leaking = leaking or form
        else:
            self._can = form = leaking or replace(found, shows_calls=False)
            if leaking is None:
                return
        *start, _ = _turn(form)
        self._find_content_form(
            "tool", lambda message: [*start, message], tool_call_id="call00001", name="grunzo"
        )
        beside = [self._shows(_turn(form, text=a, reasoning=text)) for text in ("", b)]
        self._can = replace(
            self._can,
            text_beside_calls="always" if all(beside) else "sometimes" if beside[0] else "never",
            takes_parallel_calls=self._shows(_turn(form, count=2)),
            takes_user_after_result=self._shows([*_turn(form), _user(c)]),
        )

    def _find_reasoning(self) -> Extent:
        a, b, c, *_ = _WORDS
        answer = {**_assistant(a), **dict.fromkeys(REASONING_NAMES, "kivnep")}
        turn = _turn(self._can, reasoning="kivnep")
        conversations = (
            [_user(b), answer, _user(c)],
            turn,
            [*turn, _assistant(b), _user(c)],
        )
        shown = {
            "kivnep" in self._render(adapt_messages(messages, self._can), self._tools, {})
            for messages in conversations
        }
        return "sometimes" if len(shown) > 1 else "always" if True in shown else "never"

    def _reads(self, variable: str) -> bool:
        """Return whether a variable changes the prompt."""
        values = ("low", "high", "max", "none", True, False)
        return len({self._try([_user(_WORDS[0])], {variable: value}) for value in values}) > 1


_AS_SENT = TemplateCapabilities()
"""Forms of a conversation that is not adapted."""


def _call_forms(found: TemplateCapabilities) -> Iterator[TemplateCapabilities]:
    """Yield the forms in which a template may take calls and their results, the most usual first."""
    results: tuple[ContentForm, ...] = ("text", "part")
    arguments: tuple[ArgumentsForm, ...] = ("object", "text")
    contents: tuple[CallContent, ...] = ("absent", "none", "empty")
    for result, each, content in itertools.product(results, arguments, contents):
        forms = {**found.content, "tool": result}
        yield replace(found, content=forms, arguments=each, call_content=content)


def _turn(
    form: TemplateCapabilities, *, text: str = "", reasoning: str = "", count: int = 1
) -> list[Message]:
    """Return a conversation of a question, an answer with calls, and their results."""
    words = _WORDS[-2 * count :]
    calls = []
    for number, word in enumerate(words[:count], 1):
        arguments: object = {"pleckon": word}
        if form.arguments == "text":
            arguments = json.dumps(arguments)
        function = {"name": "grunzo", "arguments": arguments}
        calls.append({"id": f"call0000{number}", "type": "function", "function": function})
    message = {"role": "assistant", "content": text or None, "tool_calls": calls}
    if reasoning:
        message |= dict.fromkeys(REASONING_NAMES, reasoning)
    results = [
        {"role": "tool", "content": word, "tool_call_id": f"call0000{number}", "name": "grunzo"}
        for number, word in enumerate(words[count:], 1)
    ]
    return [_user("askwerp"), message, *results]


def _ordinary(form: TemplateCapabilities) -> Iterator[list[Message]]:
    """Yield conversations as clients send them, with a system message, several turns, and several calls in a turn."""
    a, b, c, d, e, f, *_ = _WORDS
    _, *calls = _turn(form, text=a)
    _, *bare_calls = _turn(form)
    yield [_system(a), _user(b), _assistant(c), _user(d), _assistant(e), _user(f)]
    yield [_system(b), _user(c), *calls]
    yield [_system(b), _user(c), *bare_calls]
    yield [_user(b), *calls, {**calls[0], "content": d}, *calls[1:], _assistant(e), _user(f)]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _has_words(prompt: str, messages: Sequence[Message]) -> bool:
    """Return whether a prompt has all words of messages, without their reasoning."""
    words: list[str] = []
    for message in messages:
        content = message.get("content")
        words += (
            [part["text"] for part in content] if isinstance(content, list) else [content or ""]
        )
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            values = json.loads(arguments) if isinstance(arguments, str) else arguments
            words += ["grunzo", *values, *values.values()]
    return all(word in prompt for word in words)
