"""Moderation: a model of this gateway decides whether prompts are accepted, and which part of an answer is sent.

A classifier names the most probable label of a text. The words in the answer of a chat model are its labels. In place
of a model, a Presidio analyzer finds entities.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import httpx2
import msgspec
import structlog

from argosy.deployment import Moderation
from argosy.gateway.backends import MALFORMED_EVENT_ERRORS
from argosy.gateway.content_session import OVERLAP_CHARS, ContentSession, split_text
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.proxy.content_writer import STOPPED, find_texts
from argosy.gateway.proxy.model_call import ModelCaller
from argosy.gateway.proxy.refusal_errors import RETRY_AFTER_S
from argosy.gateway.proxy.response_writers import ResponseWriter, WrappingWriter
from argosy.gateway.request_context import CHAT, CLASSIFY, RequestContext
from argosy.protocol import EVENT_END, ApiError, event_data, format_event
from argosy.proxies import direct_mounts

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

MAX_CONCURRENT_PER_TENANT = 8
"""Texts of one tenant that are moderated at a time. Others wait, within the time of their moderation."""
MAX_PROMPT_PIECES = 256
"""Texts of one prompt that are moderated. A longer prompt counts as one that cannot be moderated."""
MAX_APPROVED_TEXTS = 20_000
"""Approved texts whose digests are kept, by tenant, so that earlier turns of a conversation are not moderated again."""
MAX_HELD_BYTES = 4 << 20
"""Size of events that wait for a verdict, above which an answer ends."""
MAX_WINDOWS = 4
"""Windows of an answer that share a verdict, if the answer arrives faster than verdicts do."""
ANSWER_TOKENS = 32
UNAVAILABLE = "moderation_unavailable"
"""Stands for a label where a text could not be moderated."""
_FAILURES = (TimeoutError, OSError, httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError)
"""Errors of a model or an analyzer that does not answer, or not as it should."""
_WORD = re.compile(r"[^\s,;:.]+")
_DONE = b"[DONE]"
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class _Finding(msgspec.Struct, frozen=True):
    """Entity that a Presidio analyzer has found."""

    entity_type: str
    start: int
    end: int
    score: float


class Moderator:
    """Asks models about texts, within bounds of time and concurrency."""

    def __init__(self, models: ModelRouter, caller: ModelCaller) -> None:
        self._models = models
        self._caller = caller
        self._clients: dict[str, httpx2.AsyncClient] = {}
        """Connections to Presidio analyzers by their addresses."""
        self._slots = WeakValueDictionary[str, asyncio.Semaphore]()
        self._approved: OrderedDict[bytes, None] = OrderedDict()

    async def close(self) -> None:
        """Close the connections to analyzers."""
        for client in self._clients.values():
            await client.aclose()

    async def review_prompt(self, context: RequestContext) -> None:
        """Let the content rule of a request decide about its prompt.

        Raises:
            ApiError: 400 if it is refused. 503 if it could not be moderated, unless the rule lets it pass then.
        """
        session, moderation = _read_settings(context)
        names = context.api.text_fields
        pieces = session.list_prompt_pieces(context.fields, names)
        label: str | None = UNAVAILABLE
        if len(pieces) <= MAX_PROMPT_PIECES:
            if moderation.action == "redact":
                await session.rewrite_prompt(context.fields, names, partial(self._redact, context))
                return
            labels = await asyncio.gather(*(self._find_label(context, each) for each in pieces))
            # A piece without a verdict may pass, but not another one's label.
            label = min(filter(None, labels), key=UNAVAILABLE.__eq__, default=None)
        if label is None or not self._decide(context, "input", label):
            return
        if label == UNAVAILABLE:
            raise _unavailable_error()
        message = f"The prompt has text that this gateway does not accept (moderation: {label}). Change it."
        raise ApiError(400, "content_refused", message, param=context.fields.prompt_field)

    async def refuses_output(self, context: RequestContext, text: str) -> bool:
        """Return whether a part of an answer may not be sent."""
        label = await self._find_label(context, text)
        return label is not None and self._decide(context, "output", label)

    async def _find_label(self, context: RequestContext, text: str) -> str | None:
        """Return the label for which a text is refused, or `UNAVAILABLE`; None if it is accepted."""
        _, moderation = _read_settings(context)
        identity = _encode(
            (
                moderation.model,
                moderation.analyzer_url,
                moderation.language,
                moderation.labels,
                context.principal.tenant,
                text,
            )
        )
        digest = hashlib.blake2b(identity, digest_size=16).digest()
        if digest in self._approved:
            self._approved.move_to_end(digest)
            return None
        try:
            async with self._hold_slot(context, moderation):
                label = await self._ask(context, moderation, text)
        except (ApiError, *_FAILURES) as error:
            _log_failure(moderation, error)
            return UNAVAILABLE
        if label is None:
            self._approved[digest] = None
            if len(self._approved) > MAX_APPROVED_TEXTS:
                self._approved.popitem(last=False)
        return label

    @contextlib.asynccontextmanager
    async def _hold_slot(
        self, context: RequestContext, moderation: Moderation
    ) -> AsyncIterator[None]:
        """Hold a slot of the tenant for one verdict. Raises TimeoutError if that, or the verdict, takes too long."""
        slots = asyncio.Semaphore(MAX_CONCURRENT_PER_TENANT)
        async with (
            asyncio.timeout(moderation.timeout_s),
            self._slots.setdefault(context.principal.tenant, slots),
        ):
            yield

    async def _ask(self, context: RequestContext, moderation: Moderation, text: str) -> str | None:
        """Return the label for which the model refuses a text; None if it accepts it."""
        if moderation.model is None:
            entities = await self._analyze(moderation, text)
            return entities[0].entity_type if entities else None
        is_classifier = self._models.has_task(moderation.model, "classify")
        api, body = CHAT, _build_chat(moderation.model, text)
        if is_classifier:
            api, body = CLASSIFY, _encode({"model": moderation.model, "input": text})
        answer = _decode(
            await self._caller.call(context, api, body, timeout_s=moderation.timeout_s)
        )
        if is_classifier:
            row = answer["data"][0]
            found = {str(row["label"]): float(max(row["probs"]))}
        else:
            words = _WORD.findall(answer["choices"][0]["message"]["content"] or "")
            found = dict.fromkeys(words, 1.0)
            if not words:
                raise ValueError("an empty answer is no verdict")
        return _find_refused(found, moderation.labels)

    async def _redact(self, context: RequestContext, text: str) -> str:
        """Return a text of a prompt with entities replaced. Raises ApiError: 503 if that fails, unless it may pass."""
        session, moderation = _read_settings(context)
        try:
            async with self._hold_slot(context, moderation):
                entities = await self._analyze(moderation, text)
        except _FAILURES as error:
            _log_failure(moderation, error)
            if self._decide(context, "input", UNAVAILABLE):
                raise _unavailable_error() from None
            return text
        output, position = [], 0
        for entity in sorted(entities, key=lambda each: (each.start, -each.end)):
            if position <= entity.start < entity.end <= len(text):
                output += [text[position : entity.start], f"[{entity.entity_type.lower()}]"]
                position = entity.end
                session.findings["input", entity.entity_type.lower(), "redact"] += 1
        return "".join(output) + text[position:]

    async def _analyze(self, moderation: Moderation, text: str) -> list[_Finding]:
        """Return what a Presidio analyzer finds of the labels, in the order of their scores.

        Raises:
            ValueError: Its answer is not a list of entities.
            httpx2.HTTPError: It cannot be reached.
        """
        url = f"{moderation.analyzer_url}".rstrip("/")
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = httpx2.AsyncClient(mounts=direct_mounts(url))
        body = {
            "text": text,
            "language": moderation.language,
            "entities": list(moderation.labels),
            "score_threshold": min(moderation.labels.values()),
        }
        response = await client.post(f"{url}/analyze", json=body, timeout=moderation.timeout_s)
        response.raise_for_status()
        found = msgspec.json.decode(response.content, type=list[_Finding])
        return sorted(
            (each for each in found if each.score >= moderation.labels.get(each.entity_type, 2.0)),
            key=lambda each: -each.score,
        )

    @staticmethod
    def _decide(context: RequestContext, side: str, label: str) -> bool:
        """Count a label, and return whether the text is refused for it."""
        session, moderation = _read_settings(context)
        is_refused = label != UNAVAILABLE or moderation.fail == "closed"
        name = label if label == UNAVAILABLE else f"moderation:{label}"
        session.findings[side, name, "stop" if is_refused else "report"] += 1
        return is_refused


def _read_settings(context: RequestContext) -> tuple[ContentSession, Moderation]:
    """Return the content session of a request with moderation, and the settings of that."""
    session = context.content
    moderation = None if session is None else session.moderation
    assert session is not None  # noqa: S101 - checked by the handlers
    assert moderation is not None  # noqa: S101
    return session, moderation


def _log_failure(moderation: Moderation, error: Exception) -> None:
    reason = error.code if isinstance(error, ApiError) else type(error).__name__
    log.warning("moderation_failed", model=moderation.model or "", reason=reason)


def _unavailable_error() -> ApiError:
    message = (
        "The prompt could not be moderated, because it is too long, the moderation does not answer in time, or "
        "the limits of the project leave no room for it. Try again, or send a shorter prompt."
    )
    return ApiError(503, UNAVAILABLE, message, retry_after_s=RETRY_AFTER_S)


def _build_chat(model: str, text: str) -> bytes:
    return _encode(
        {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
        }
    )


def _find_refused(found: Mapping[str, float], labels: Mapping[str, float]) -> str | None:
    """Return the first of the labels whose probability reaches its threshold, whatever their case."""
    probabilities = {name.lower(): value for name, value in found.items()}
    for name, threshold in labels.items():
        if probabilities.get(name.lower(), -1.0) >= threshold:
            return name
    return None


class ModerationWriter(WrappingWriter):
    """Response writer that holds an answer back until the moderation model has accepted it, part by part."""

    def __init__(
        self, writer: ResponseWriter, context: RequestContext, moderator: Moderator
    ) -> None:
        """Create the writer of a response.

        Args:
            writer: Sends the events of accepted parts.
            context: The request, whose content rule moderates answers.
            moderator: Decides about the parts.
        """
        super().__init__(writer)
        _, moderation = _read_settings(context)
        self._window_chars = moderation.window_chars
        self._context = context
        self._moderator = moderator
        self._held: deque[tuple[bytes, dict[int, str]]] = deque()
        """Events that wait for a verdict, with their texts by choice."""
        self._held_bytes = 0
        self._held_chars = 0
        self._tails: dict[int, str] = {}
        """Ends of the accepted texts."""
        self._is_refused = False
        self._is_ending = False
        self._task: asyncio.Task[None] | None = None
        self._error: ApiError | None = None

    @property
    def is_full(self) -> bool:  # type: ignore[override]
        """Whether the response must end: a part is refused, too much is held, or it is too long."""
        is_over = self._held_bytes > MAX_HELD_BYTES
        return self._is_refused or is_over or self._error is not None or self._writer.is_full

    @property
    def finish_reason(self) -> str:  # type: ignore[override]
        return STOPPED if self._is_refused else self._writer.finish_reason

    def write_events(self, events: bytes) -> None:
        """Hold events until their text is accepted.

        Raises:
            ValueError: An event is not a chunk of a response.
        """
        if self._is_refused:
            self._write(_remove_text(events))
            return
        for event in events.removesuffix(EVENT_END).split(EVENT_END):
            try:
                texts = _find_event_texts(event)
            except MALFORMED_EVENT_ERRORS as error:
                raise ValueError(f"an event is malformed ({error})") from error
            self._held.append((event + EVENT_END, texts))
            self._held_chars += sum(map(len, texts.values()))
        self._held_bytes += len(events)
        if self._task is None and self._is_due:
            self._task = asyncio.create_task(self._review())

    @property
    def _is_due(self) -> bool:
        """Whether the held events are to be moderated."""
        is_full = self._held_chars >= self._window_chars
        return bool(self._held) and (self._is_ending or is_full)

    async def _review(self) -> None:
        """Moderate held events, until too few are left."""
        while self._is_due and not self._is_refused:
            events, texts = self._take()
            parts = [self._tails.get(index, "") + text for index, text in texts.items() if text]
            refused = [await self._moderator.refuses_output(self._context, each) for each in parts]
            self._held_bytes -= len(events)
            self._is_refused = any(refused)
            for index, text in texts.items():
                self._tails[index] = (self._tails.get(index, "") + text)[-OVERLAP_CHARS:]
            if self._is_refused:
                events = _remove_text(events + b"".join(event for event, _ in self._held))
                self._held.clear()
            self._write(events)
        self._task = None

    def _take(self) -> tuple[bytes, dict[int, str]]:
        """Take events for one verdict, with their texts by choice."""
        events, texts, chars = [], dict[int, str](), 0
        while self._held and chars < MAX_WINDOWS * self._window_chars:
            event, found = self._held.popleft()
            events.append(event)
            for index, text in found.items():
                texts[index] = texts.get(index, "") + text
                chars += len(text)
        self._held_chars -= chars
        return b"".join(events), texts

    def _write(self, events: bytes) -> None:
        try:
            if events:
                self._writer.write_events(events)
        except ValueError:
            message = "An event of the replica is malformed. Try again shortly."
            self._error = ApiError(502, "upstream_failed", message)

    def flush(self) -> None:
        """Drop what has no verdict, because an error ends the stream."""
        self._drop()
        self._writer.flush()

    def discard(self) -> bool:
        is_discarded = self._writer.discard()
        if is_discarded:
            self._drop()
            self._tails, self._is_refused = {}, False
        return is_discarded

    async def finish(self) -> None:
        """Wait for the verdict on the rest, and end the response. Raises ApiError as the writer does, or 502."""
        self._is_ending = True
        if self._task is not None:
            await self._task
        await self._review()
        if self._error is not None:
            raise self._error
        await self._writer.finish()

    async def review_body(self, body: bytes) -> bytes:
        """Return a response in one piece; without its texts if they are refused."""
        response = _decode(body)
        for choice in response.get("choices") or ():
            message = choice.get("message", choice)
            texts = [(holder, field) for holder, field, _ in find_texts(message)]
            text = "\n".join(holder[field] for holder, field in texts)
            for piece in split_text(text, self._window_chars):
                self._is_refused = self._is_refused or await self._moderator.refuses_output(
                    self._context, piece
                )
        if self._is_refused:
            message = {"role": "assistant", "content": "", "refusal": None}
            response["choices"] = [
                _build_stopped_choice(
                    each["index"], {"message": message} if "message" in each else {"text": ""}
                )
                for each in response["choices"]
            ]
            body = _encode(response)
        return await self._writer.review_body(body)

    def close(self) -> None:
        self._drop()
        self._writer.close()

    def _drop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._held.clear()
        self._held_bytes = self._held_chars = 0


def _find_event_texts(event: bytes) -> dict[int, str]:
    """Return the texts of an event by choice."""
    data = event_data(event)
    if data is None or data == _DONE:
        return {}
    return {
        choice["index"]: "".join(
            holder[field] for holder, field, _ in find_texts(choice.get("delta", choice))
        )
        for choice in _decode(data).get("choices") or ()
    }


def _remove_text(events: bytes) -> bytes:
    """Return the ends, the usage and the other events of an answer without text."""
    output = []
    for event in events.removesuffix(EVENT_END).split(EVENT_END):
        data = event_data(event)
        if data is None or data == _DONE:
            output.append(event + EVENT_END)
            continue
        chunk = _decode(data)
        choices = chunk.get("choices")
        if choices:
            chunk["choices"] = [
                _build_stopped_choice(
                    each["index"], {"delta": {}} if "delta" in each else {"text": ""}
                )
                for each in choices
                if each.get("finish_reason") is not None
            ]
        if not choices or chunk["choices"]:
            output.append(format_event(_encode(chunk)))
    return b"".join(output)


def _build_stopped_choice(index: int, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the end of a choice whose text is refused. Any other field of it might repeat the text."""
    end = {"logprobs": None, "finish_reason": STOPPED, "stop_reason": None}
    return {"index": index, **text, **end}
