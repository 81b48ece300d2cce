"""Settings of content rules: what is filtered from the prompts and answers of which requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.deployment.settings.routing_config import RequestConditions
from argosy.policy.content import (
    DETECTORS,
    MARKUP_DETECTORS,
    Action,
    Detector,
    Matcher,
    PatternError,
    Rule,
    create_custom_detector,
    create_word_detector,
)
from argosy.settings import ByCommandLine, ByOperator

ALL_DETECTORS = "*"
"""Stands for all detectors of personal data and secrets."""
DetectorName = Annotated[
    str, Meta(pattern=r"^(\*|[a-z][a-z0-9_]{0,39})$(?!\n)", examples=["email"])
]
Actions = dict[DetectorName, Action]
StoredActions = dict[DetectorName, Literal["redact", "mask", "report"]]


ModerationSide = Literal["input", "output"]


class Moderation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a model, or of a Presidio analyzer, that decides about prompts and answers."""

    model: ByOperator[str | None] = None
    """The model, by any of its names: a classifier, or one that answers chats with labels such as `unsafe` and `S1`."""
    analyzer_url: ByCommandLine[
        Annotated[str, Meta(pattern=r"^https?://[^\s]+$(?!\n)", examples=["http://10.0.0.3:3000"])]
        | None
    ] = None
    """Address of a Presidio analyzer in place of a model. Labels are then its entities, such as `PERSON`."""
    language: ByOperator[Annotated[str, Meta(min_length=2, max_length=10)]] = "en"
    """Language of the texts for the analyzer."""
    action: ByOperator[Literal["stop", "redact"]] = "stop"
    """Effect of a label: `stop` refuses a prompt and ends an answer. With an analyzer, `redact` replaces what it finds
    in prompts by the entity's name, such as `[person]`."""
    labels: ByOperator[Annotated[dict[str, Annotated[float, Meta(ge=0, le=1)]], Meta(min_length=1)]]
    """Smallest probability of each label for which a text is refused. Words of a chat's answer have probability 1."""
    sides: ByOperator[Annotated[tuple[ModerationSide, ...], Meta(min_length=1)]] = ("input",)
    """Texts that it decides about: `input`, `output`, or both."""
    fail: ByOperator[Literal["closed", "open"]] = "closed"
    """Whether a text is refused (`closed`) or passes (`open`) if the model does not answer."""
    timeout_s: ByOperator[Annotated[float, Meta(gt=0, le=60)]] = 5.0
    """Time for the verdict on a text."""
    window_chars: ByOperator[Annotated[int, Meta(ge=100, le=20_000)]] = 1000
    """Characters of an answer that are held back for one verdict, and of a prompt that are sent at once."""


class ContentRule(RequestConditions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one content rule: its conditions, and what is filtered if they hold."""

    output: ByOperator[Actions] = msgspec.field(default_factory=dict)
    """Action for text in answers, by detector: `redact`, `mask`, `stop` or `report`. `*` stands for all detectors
    of personal data and secrets. Log-probabilities and token ids are left out of filtered answers."""
    tool_arguments: ByOperator[Literal["stop", "report", "as_output"]] = "stop"
    """Action for text in the arguments of tool calls. A changed argument can change what a tool does, so the default
    ends the answer."""
    input: ByOperator[Actions] = msgspec.field(default_factory=dict)
    """Action for text in prompts, by detector. `stop` refuses the request."""
    restore: ByOperator[bool] = False
    """Replace what is redacted in prompts by numbered placeholders, such as `[email_1]`, and put the originals in their
    places in the answer."""
    at_rest: ByOperator[StoredActions | None] = None
    """Action for text that the gateway stores: responses, chats, conversations, and contents of explanations. By
    default it removes what `input` and `output` remove or stop. `{}` stores prompts as they were sent, and answers as
    the client received them."""
    moderation: ByOperator[Moderation | None] = None
    """Model that decides whether prompts are accepted and answers are sent."""
    words: ByOperator[dict[DetectorName, Annotated[tuple[str, ...], Meta(min_length=1)]]] = (
        msgspec.field(default_factory=dict)
    )
    """Detectors of whole words or phrases, whatever their case."""
    patterns: ByOperator[dict[DetectorName, str]] = msgspec.field(default_factory=dict)
    """Detectors of regular expressions (RE2, ASCII classes) whose matches are whole words of at most 256 characters."""


class ContentMatchers(msgspec.Struct, frozen=True):
    """The compiled detectors of a content rule. None where nothing is filtered."""

    output: Matcher | None
    tool_arguments: Matcher | None
    input: Matcher | None
    stored: Matcher | None = None
    keeps_answers: bool = True
    """Whether answers as clients receive them have nothing that may not be stored."""


def compile_content_rule(rule: ContentRule) -> ContentMatchers:
    """Compile the detectors of a rule.

    Raises:
        ValueError: A detector is unknown, or a pattern or list of words cannot be used. The message says what to
            change.
    """
    if not (rule.output or rule.input or rule.at_rest or rule.moderation):
        raise ValueError(
            "nothing is filtered. Add `output`, `input` or `at_rest` with a detector, or `moderation`."
        )
    if rule.restore and "redact" not in rule.input.values():
        raise ValueError(
            "restore: nothing in `input` has the action redact. Add it, or remove restore."
        )
    known = DETECTORS | MARKUP_DETECTORS
    for setting, names in (("words", rule.words), ("patterns", rule.patterns)):
        for name in names:
            if name in known or name == ALL_DETECTORS:
                raise ValueError(f"{setting}: the name {name!r} is taken. Choose another one.")
            try:
                known[name] = (
                    (create_word_detector(name, list(rule.words[name])),)
                    if setting == "words"
                    else (create_custom_detector(name, rule.patterns[name]),)
                )
            except PatternError as error:
                raise ValueError(f"{setting}.{name}: {error}") from error
    output = _list_rules("output", rule.output, known)
    arguments = output
    if rule.tool_arguments != "as_output":
        action = rule.tool_arguments
        arguments = [
            each if each.action == "report" else each._replace(action=action) for each in output
        ]
    prompts = _list_rules("input", rule.input, known)
    if rule.at_rest is None:
        stored = [
            each if each.action == "mask" else each._replace(action="redact")
            for each in dict.fromkeys((*output, *prompts))
            if each.action != "report"
        ]
    else:
        stored = _list_rules("at_rest", rule.at_rest, known)
    changed = {each.detector for each in arguments if each.action != "report"}
    return ContentMatchers(
        output=_compile(output),
        tool_arguments=_compile(arguments),
        input=_compile(prompts),
        stored=_compile(stored),
        keeps_answers=not rule.restore
        and all(each.action == "report" or each.detector in changed for each in stored),
    )


def validate_moderation(rule: ContentRule, model_names: Collection[str]) -> None:
    """Check the moderation of a rule. Raises ValueError, which says what to change, if it cannot work."""
    moderation = rule.moderation
    if moderation is None:
        return
    if (moderation.model is None) == (moderation.analyzer_url is None):
        raise ValueError("moderation: give one of `model` and `analyzer_url`.")
    if moderation.model is not None and moderation.model not in model_names:
        known = ", ".join(sorted(model_names))
        raise ValueError(
            f"moderation.model: no model has the name {moderation.model!r}. Use one of {known}."
        )
    is_possible = moderation.analyzer_url is not None and moderation.sides == ("input",)
    if moderation.action == "redact" and not is_possible:
        raise ValueError(
            "moderation.action: `redact` needs an `analyzer_url` and `sides: [input]`."
        )


def _compile(rules: list[Rule]) -> Matcher | None:
    return Matcher(rules) if rules else None


def _list_rules(
    setting: str, actions: Mapping[DetectorName, Action], known: Mapping[str, tuple[Detector, ...]]
) -> list[Rule]:
    """Return a rule for each detector, those that are named before those that `*` stands for."""
    chosen = {name: action for name, action in actions.items() if name != ALL_DETECTORS}
    unknown = sorted(chosen.keys() - known.keys())
    if unknown:
        names = ", ".join(known)
        raise ValueError(f"{setting}: no detector has the name {unknown[0]!r}. Use one of {names}.")
    if ALL_DETECTORS in actions:
        chosen |= dict.fromkeys(DETECTORS.keys() - chosen.keys(), actions[ALL_DETECTORS])
    return [
        Rule(each, chosen[name])
        for name, group in known.items()
        if name in chosen
        for each in group
    ]
