"""Writes the body of a planned request for the server at hand."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np

from argosy.bench.plan import Messages, PlannedRequest, Prompt, Span, Spans, Text
from argosy.bench.target import Target
from argosy.bench.words import WORDS

_SHARED_SPANS = 4096
"""Drawn spans that are remembered: prefixes and blocks of traces come again. The last of a prompt is its own."""


class Exchange(msgspec.Struct, frozen=True):
    """A turn that is over."""

    asked: str
    answered: str


class Writer:
    """Bodies for one server. What it writes depends on the request, the history and the server alone."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._ids = np.asarray(target.vocabulary, dtype=np.int64)
        self._draw_ids = functools.lru_cache(_SHARED_SPANS)(self._ids_of)
        self._draw_words = functools.lru_cache(_SHARED_SPANS)(self._words_of)

    def body(self, request: PlannedRequest, history: list[Exchange]) -> bytes:
        """The JSON of the request after the turns of `history`."""
        fields = self.target.fields(request.output_tokens)
        return msgspec.json.encode(fields | self._prompt(request.prompt, history))

    def text(self, prompt: Prompt) -> str:
        """The prompt as text."""
        match prompt:
            case Text(text):
                return text
            case Messages(messages):
                return "\n".join(str(message.get("content", "")) for message in messages)
            case Spans(spans):
                *shared, own = self._less_overhead(spans)
                return " ".join([*map(self._draw_words, shared), self._words_of(own)])

    def _prompt(self, prompt: Prompt, history: list[Exchange]) -> dict[str, Any]:
        target = self.target
        if target.api == "chat":
            messages: list[dict[str, Any]] = []
            for turn in history:
                messages.append({"role": "user", "content": turn.asked})
                messages.append({"role": "assistant", "content": turn.answered})
            if isinstance(prompt, Messages):
                return {"messages": [*messages, *prompt.messages]}
            return {"messages": [*messages, {"role": "user", "content": self.text(prompt)}]}
        if isinstance(prompt, Spans) and target.vocabulary and not history:
            *shared, own = prompt.spans
            drawn = [*map(self._draw_ids, shared), self._ids_of(own)]
            return {"prompt": [token for ids in drawn for token in ids]}
        before = "".join(f"{turn.asked}{turn.answered}\n" for turn in history)
        return {"prompt": before + self.text(prompt)}

    def _less_overhead(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Shorten the last span by what the server adds."""
        last = spans[-1]
        tokens = max(last.tokens - round(self.target.overhead_tokens), 1)
        return (*spans[:-1], Span(last.seed, tokens))

    def _ids_of(self, span: Span) -> list[int]:
        places = np.random.default_rng(span.seed).integers(len(self._ids), size=span.tokens)
        drawn: list[int] = self._ids[places].tolist()
        return drawn

    def _words_of(self, span: Span) -> str:
        count = max(round(span.tokens / self.target.tokens_per_word), 1)
        places = np.random.default_rng(span.seed).integers(len(WORDS), size=count)
        return " ".join(WORDS[place] for place in places.tolist())
