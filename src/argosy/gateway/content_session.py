"""Content filters of one request: of its prompt, of its answer's texts, and of what is stored of both."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from argosy.deployment import ContentRule, Moderation, ModerationSide
from argosy.gateway.model_routes import RequestRule
from argosy.gateway.request_fields import RequestFields
from argosy.policy.content import (
    JsonFilter,
    Matcher,
    Rule,
    TextFilter,
    create_custom_detector,
)
from argosy.protocol import ApiError, RequestReport

T = TypeVar("T")

MAX_PLACEHOLDERS = 10_000
"""Different texts of one prompt that are put back in its answer. Further ones get the detector's name only."""
TURN_CHARS = 1 << 15
"""Characters of a prompt that are filtered before other requests have a turn of the event loop."""
MAX_REPORT_CHARS = 1 << 16
"""Longest prompt or output that is filtered for explanations."""
MAX_SUMMARY_CHARS = 200
"""Length of the findings in a row of the ledger."""
OVERLAP_CHARS = 200
"""Characters before a piece of a text that are moderated with it."""
TEXT_COST_CHARS = 200
"""Characters that each text counts in addition, for its filter."""
_COMMON_NAMES = frozenset(
    {
        *(
            "role",
            "content",
            "type",
            "text",
            "name",
            "id",
            "tool_calls",
            "tool_call_id",
            "function",
        ),
        *("arguments", "image_url", "url", "status", "output", "call_id", "annotations"),
    }
)
"""Names in almost every message, which are not filtered."""
_UNFILTERED_KEYS = frozenset({"role", "type", "id", "tool_call_id", "format", "detail"})
"""Fields of messages that are no text."""
_MEDIA_KEYS = frozenset({"url", "image_url", "file_data"})
"""Fields of messages with a picture, a sound or a file where they begin as `_DATA_URL`."""
_ARGUMENTS = "arguments"
"""Field of a tool call with a JSON document."""
_DATA_URL = "data:"
_PLACEHOLDERS = Matcher(
    [
        Rule(
            create_custom_detector(
                "placeholder", r"\[[a-z][a-z0-9_]{0,39}_[1-9][0-9]{0,4}\]"
            )._replace(not_before="", not_after=None),
            "redact",
        )
    ]
)


class ContentSession:
    """Filters and findings of one request. No matched text is kept but what is put back in the answer.

    Attributes:
        rule: The content rule of the request.
        findings: Number of matches by side (`input`, `output` or `stored`), detector and action.
    """

    def __init__(self, rule: RequestRule) -> None:
        assert rule.matchers is not None  # noqa: S101 - a content rule
        self.rule = rule
        self.findings: Counter[tuple[str, str, str]] = Counter()
        self._matchers = rule.matchers
        self._placeholders: dict[str, str] = {}
        """Placeholders by what they stand for."""
        self._originals: dict[str, str] = {}
        """Originals by placeholder."""
        self._numbers: Counter[str] = Counter()
        self._unyielded_chars = 0

    @property
    def filters_storage(self) -> bool:
        """Whether something is removed from what is stored."""
        return self._matchers.stored is not None

    @property
    def keeps_answers(self) -> bool:
        """Whether the answer may be stored as the client receives it."""
        return self._matchers.keeps_answers

    @property
    def filters_output(self) -> bool:
        """Whether answers are changed or watched."""
        return self._matchers.output is not None or self.rule.restores

    @property
    def moderation(self) -> Moderation | None:
        """Settings of the moderation model; None without one."""
        return self.rule.config.moderation if isinstance(self.rule.config, ContentRule) else None

    def moderates(self, side: ModerationSide) -> bool:
        """Whether a moderation model decides about the prompt or the answer."""
        return self.moderation is not None and side in self.moderation.sides

    # --- prompts -----------------------------------------------------------------------------------

    async def filter_prompt(self, fields: RequestFields, names: tuple[str, ...]) -> None:
        """Filter the texts of a request in its fields with these names.

        Raises:
            ApiError: 400 if the rule refuses what was found, or if the prompt is tokens, whose text is unknown.
        """
        if self._matchers.input is None:
            return
        for name, value in _decode_texts(fields, names):
            filtered = await self._filter_value(
                value, name, "input", self._matchers.input, self._replace_in_prompt
            )
            fields.raw[name] = Raw(msgspec.json.encode(filtered))

    async def rewrite_prompt(
        self,
        fields: RequestFields,
        names: tuple[str, ...],
        rewrite: Callable[[str], Awaitable[str]],
    ) -> None:
        """Replace each text of a request by what `rewrite` returns, all at the same time.

        Raises:
            ApiError: As `rewrite` does, or 400 if the prompt is tokens, whose text is unknown.
        """
        for name, value in _decode_texts(fields, names):
            root = [value]
            places = [(each, key) for each, key in _find_texts(root) if key is not None]
            texts = list(dict.fromkeys(container[key] for container, key in places))
            rewritten = dict(zip(texts, await asyncio.gather(*map(rewrite, texts)), strict=True))
            for container, key in places:
                container[key] = rewritten[container[key]]
            fields.raw[name] = Raw(msgspec.json.encode(root[0]))

    def list_prompt_pieces(self, fields: RequestFields, names: tuple[str, ...]) -> list[str]:
        """Return the texts of a request in pieces for the moderation model. Short texts share a piece.

        Raises:
            ApiError: 400 if the prompt is tokens, whose text is unknown.
        """
        assert self.moderation is not None  # noqa: S101 - checked by the caller
        size = self.moderation.window_chars
        pieces: list[str] = []
        for _, value in _decode_texts(fields, names):
            for container, key in _find_texts([value]):
                text = container[key] if key is not None else ""
                if pieces and text and len(pieces[-1]) + len(text) < size:
                    pieces[-1] += f"\n{text}"
                else:
                    pieces += split_text(text, size)
        return pieces

    async def filter_stored(self, value: T) -> T:
        """Return a JSON value as it may be stored. The value itself does not change."""
        if self._matchers.stored is None:
            return value
        copy: T = msgspec.json.decode(msgspec.json.encode(value))
        return await self._filter_value(copy, "", "stored", self._matchers.stored, None)

    def filter_report(self, report: RequestReport) -> RequestReport:
        """Return a replica's report with its prompts and outputs as they may be stored. Long ones are left out."""
        matcher = self._matchers.stored
        if matcher is None or not report.has_content:
            return report

        def filter_text(text: str) -> str:
            if len(text) > MAX_REPORT_CHARS:
                return f"[{len(text)} characters]"
            text_filter = TextFilter(matcher)
            text = text_filter.feed(text) + text_filter.flush()
            self._count("stored", text_filter)
            return text

        return msgspec.structs.replace(
            report,
            prompts=list(map(filter_text, report.prompts)),
            outputs=list(map(filter_text, report.outputs)),
        )

    async def _filter_value(
        self,
        value: T,
        field: str,
        side: str,
        matcher: Matcher,
        replace: Callable[[Rule, str], str] | None,
    ) -> T:
        """Filter all texts in a JSON value in place, in the order in which they stand, and names of objects too.

        Args:
            value: The value.
            field: Its name in the request, for errors.
            side: Side of the findings.
            matcher: The rules.
            replace: Returns the replacement of a match; None for that of its detector.

        Returns:
            The value, or the filtered text if it is one.

        Raises:
            ApiError: 400 if a rule refuses what was found.
        """
        root = [value]
        names: dict[str, str] = {}

        async def filter_text(text: str, *, is_json: bool) -> str:
            content_filter = (JsonFilter if is_json else TextFilter)(matcher, replace)
            return await self._filter_text(text, content_filter, field, side)

        for container, key in _find_texts(root):
            if key is not None:
                is_json = key == _ARGUMENTS
                container[key] = await filter_text(container[key], is_json=is_json)
                continue
            for name in container:
                if name not in names and name not in _COMMON_NAMES:
                    names[name] = await filter_text(name, is_json=False)
            if any(names.get(name, name) != name for name in container):
                items = [(names.get(name, name), each) for name, each in container.items()]
                container.clear()
                container.update(items)
        return root[0]

    async def _filter_text(
        self, text: str, content_filter: TextFilter | JsonFilter, field: str, side: str
    ) -> str:
        """Filter one text, with turns for other requests. The arguments and errors are those of `_filter_value`."""
        pieces = []
        for start in range(0, len(text), TURN_CHARS):
            piece = text[start : start + TURN_CHARS]
            self._unyielded_chars += len(piece) + TEXT_COST_CHARS
            if self._unyielded_chars > TURN_CHARS:
                self._unyielded_chars = 0
                await asyncio.sleep(0)
            pieces.append(content_filter.feed(piece))
        filtered = "".join(pieces) + content_filter.flush()
        self._count(side, content_filter)
        if content_filter.stopped_by is not None:
            message = (
                f"The prompt has text that this gateway does not accept ({content_filter.stopped_by}). "
                "Remove it."
            )
            raise ApiError(400, "content_refused", message, param=field)
        return filtered

    def _replace_in_prompt(self, rule: Rule, match: str) -> str:
        if rule.action != "redact" or not self.rule.restores:
            return rule.detector.replace(match, rule.action)
        placeholder = self._placeholders.get(match)
        if placeholder is None:
            name = rule.detector.name
            if len(self._placeholders) >= MAX_PLACEHOLDERS:
                return f"[{name}]"
            self._numbers[name] += 1
            placeholder = self._placeholders[match] = f"[{name}_{self._numbers[name]}]"
            self._originals[placeholder] = match
        return placeholder

    # --- answers -----------------------------------------------------------------------------------

    def create_filter(self, *, is_json: bool, is_argument: bool) -> ChannelFilter:
        """Create the filter of one text of an answer.

        Args:
            is_json: Whether the text is a JSON document that has to stay valid.
            is_argument: Whether it is the arguments of a tool call.
        """
        matcher = self._matchers.tool_arguments if is_argument else self._matchers.output
        return ChannelFilter(self, matcher, is_json=is_json)

    def count_output(self, content_filter: TextFilter | JsonFilter) -> None:
        """Count the matches of one text of an answer."""
        self._count("output", content_filter)

    def restore(self, placeholder: str, *, is_json: bool) -> str:
        """Return the text that a placeholder stands for; itself if it stands for none."""
        original = self._originals.get(placeholder, placeholder)
        return msgspec.json.encode(original).decode()[1:-1] if is_json else original

    @property
    def has_placeholders(self) -> bool:
        """Whether the prompt has texts that are put back in the answer."""
        return bool(self._originals)

    def _count(self, side: str, content_filter: TextFilter | JsonFilter) -> None:
        for (name, action), count in content_filter.counts.items():
            self.findings[side, name, action] += count

    def summarise(self) -> str:
        """Return what was found in the prompt and the answer as a row of the ledger has it."""
        summary = ""
        for (side, name, action), count in self.findings.most_common():
            finding = f"{side} {'_'.join(name.split())} {action} {count}"
            longer = f"{summary}; {finding}" if summary else finding
            if side != "stored" and len(longer) <= MAX_SUMMARY_CHARS:
                summary = longer
        return summary

    def describe(self) -> list[dict[str, Any]]:
        """Return the rule with each finding for explanations; the rule alone if it has found nothing."""
        return [
            {
                "rule": self.rule.name,
                "side": side,
                "detector": name,
                "action": action,
                "count": count,
            }
            for (side, name, action), count in sorted(self.findings.items())
        ] or [{"rule": self.rule.name, "count": 0}]


class ChannelFilter:
    """Filter of one text of an answer, which then gets back what was replaced in the prompt."""

    def __init__(self, session: ContentSession, matcher: Matcher | None, *, is_json: bool) -> None:
        """Create the filter of a text that begins now. See `ContentSession.create_filter`."""
        kind = JsonFilter if is_json else TextFilter
        self._session = session
        self._filter = None if matcher is None else kind(matcher)
        self._restorer = (
            kind(
                _PLACEHOLDERS, lambda _, placeholder: session.restore(placeholder, is_json=is_json)
            )
            if session.has_placeholders
            else None
        )

    @property
    def is_stopped(self) -> bool:
        """Whether a match has ended the text."""
        return self._filter is not None and self._filter.stopped_by is not None

    def feed(self, text: str) -> str:
        """Add text, and return what is decided."""
        if self._filter is not None:
            text = self._filter.feed(text)
            if self._filter.stopped_by is not None and self._restorer is not None:
                return self._restorer.feed(text) + self._restorer.flush()
        return text if self._restorer is None else self._restorer.feed(text)

    def flush(self) -> str:
        """Return the rest of the text, which has ended."""
        text = "" if self._filter is None else self._filter.flush()
        return (
            text if self._restorer is None else self._restorer.feed(text) + self._restorer.flush()
        )

    def close(self) -> None:
        """Count the matches of the text."""
        if self._filter is not None:
            self._session.count_output(self._filter)
            self._filter = None


def _find_texts(root: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the container and key of each text in a JSON value, in the order in which they stand.

    Before the texts of an object, yields the object with None, so that the caller may change its names.
    """
    stack: list[Iterator[tuple[Any, Any]]] = [iter([(root, 0)])]
    while stack:
        entry = next(stack[-1], None)
        if entry is None:
            stack.pop()
            continue
        container, key = entry
        value = container[key]
        if isinstance(value, str):
            is_media = key in _MEDIA_KEYS and value.startswith(_DATA_URL)
            if key not in _UNFILTERED_KEYS and not is_media:
                yield container, key
        elif isinstance(value, list):
            stack.append(iter([(value, index) for index in range(len(value))]))
        elif isinstance(value, Mapping):
            yield value, None
            stack.append(iter([(value, name) for name in list(value)]))


def split_text(text: str, size: int) -> Iterator[str]:
    """Yield a text in pieces of `size` characters, each with the `OVERLAP_CHARS` before it."""
    for start in range(0, len(text), size):
        yield text[max(0, start - OVERLAP_CHARS) : start + size]


def _decode_texts(fields: RequestFields, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a request with these names, and their values.

    Raises:
        ApiError: 400 if one has token ids, whose text is unknown.
    """
    for name in names:
        if name in fields.raw:
            value = msgspec.json.decode(fields.raw[name])
            if _has_numbers(value):
                message = f"The texts of {name!r} are filtered. Send text in place of token ids."
                raise ApiError(400, "content_not_filterable", message, param=name)
            yield name, value


def _has_numbers(value: Any) -> bool:  # noqa: ANN401 - any JSON
    """Whether a prompt is a list with token ids, or with such lists."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            return True
    return False
