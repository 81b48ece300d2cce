"""Request bodies of planned requests for a probed server."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np

from argosy.bench.plan import (
    ChatPrompt,
    PlannedPrompt,
    PlannedRequest,
    SyntheticPrompt,
    SyntheticSpan,
    TextPrompt,
)
from argosy.bench.target import BenchTarget
from argosy.bench.words import WORDS

_MAX_CACHED_SPANS = 4096
"""Size of the caches for generated spans. Prefixes and trace blocks repeat, but the last span of a prompt is unique."""


class ConversationTurn(msgspec.Struct, frozen=True):
    """Completed turn of a conversation."""

    user_text: str
    assistant_text: str


class RequestBodyBuilder:
    """Builds bodies for one server. A body depends only on the request, the history and the server."""

    def __init__(self, target: BenchTarget) -> None:
        self.target = target
        self._vocabulary = np.asarray(target.vocabulary, dtype=np.int64)
        self._draw_ids = functools.lru_cache(_MAX_CACHED_SPANS)(self._generate_ids)
        self._draw_words = functools.lru_cache(_MAX_CACHED_SPANS)(self._generate_words)

    def build_body(self, request: PlannedRequest, history: list[ConversationTurn]) -> bytes:
        """Return the JSON body of the request, sent after the turns of `history`."""
        fields = self.target.build_body_fields(request.output_tokens)
        return msgspec.json.encode(fields | self._build_prompt(request.prompt, history))

    def prompt_text(self, prompt: PlannedPrompt) -> str:
        """Return the prompt as text."""
        match prompt:
            case TextPrompt(text):
                return text
            case ChatPrompt(messages):
                return "\n".join(str(message.get("content", "")) for message in messages)
            case SyntheticPrompt(spans):
                *shared, own = self._subtract_overhead(spans)
                return " ".join([*map(self._draw_words, shared), self._generate_words(own)])

    def _build_prompt(
        self, prompt: PlannedPrompt, history: list[ConversationTurn]
    ) -> dict[str, Any]:
        target = self.target
        if target.api == "chat":
            messages: list[dict[str, Any]] = []
            for turn in history:
                messages.append({"role": "user", "content": turn.user_text})
                messages.append({"role": "assistant", "content": turn.assistant_text})
            if isinstance(prompt, ChatPrompt):
                return {"messages": [*messages, *prompt.messages]}
            return {"messages": [*messages, {"role": "user", "content": self.prompt_text(prompt)}]}
        if isinstance(prompt, SyntheticPrompt) and target.vocabulary and not history:
            *shared, own = prompt.spans
            span_ids = [*map(self._draw_ids, shared), self._generate_ids(own)]
            return {"prompt": [token for ids in span_ids for token in ids]}
        history_text = "".join(f"{turn.user_text}{turn.assistant_text}\n" for turn in history)
        return {"prompt": history_text + self.prompt_text(prompt)}

    def _subtract_overhead(self, spans: tuple[SyntheticSpan, ...]) -> tuple[SyntheticSpan, ...]:
        """Shorten the last span by the tokens that the server adds."""
        last = spans[-1]
        tokens = max(last.tokens - round(self.target.overhead_tokens), 1)
        return (*spans[:-1], SyntheticSpan(last.seed, tokens))

    def _generate_ids(self, span: SyntheticSpan) -> list[int]:
        indices = np.random.default_rng(span.seed).integers(len(self._vocabulary), size=span.tokens)
        ids: list[int] = self._vocabulary[indices].tolist()
        return ids

    def _generate_words(self, span: SyntheticSpan) -> str:
        count = max(round(span.tokens / self.target.tokens_per_word), 1)
        indices = np.random.default_rng(span.seed).integers(len(WORDS), size=count)
        return " ".join(WORDS[index] for index in indices.tolist())
