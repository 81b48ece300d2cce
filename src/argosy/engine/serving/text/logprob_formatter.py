"""Formatter for log-probabilities in three shapes: chat, legacy completions, and vLLM's prompt log-probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from argosy.engine.scheduling import Logprob
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


def clamp_logprob(logprob: float) -> float:
    """Clamp `logprob` to a value that JSON can represent."""
    return max(MIN_LOGPROB, logprob)


class LogprobFormatter:
    """Formats log-probabilities. The function `token_name` names tokens by their text, or as `token_id:123`.

    The `hidden_token_ids` have no text in the response and do not advance the text offset.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        hidden_token_ids: frozenset[int],
        token_name: Callable[[int], str],
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden_token_ids = hidden_token_ids
        self._token_name = token_name

    def format_chat(self, logprobs: list[Logprob]) -> ChatLogprobs:
        """Format log-probabilities for the chat API."""
        return ChatLogprobs(
            content=[
                ChatLogprob(
                    token=self._token_name(entry.token),
                    logprob=clamp_logprob(entry.logprob),
                    bytes=list(self._tokenizer.token_bytes(entry.token)),
                    top_logprobs=[
                        self._format_top_logprob(token, logprob)
                        for token, logprob in entry.top_logprobs
                    ],
                )
                for entry in logprobs
            ]
        )

    def _format_top_logprob(self, token: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=self._token_name(token),
            logprob=clamp_logprob(logprob),
            bytes=list(self._tokenizer.token_bytes(token)),
        )

    def format_completion(
        self, token_ids: list[int], logprobs: list[Logprob], text_offset: int
    ) -> CompletionLogprobs:
        """Format log-probabilities for the legacy completions API.

        Leading tokens without a log-probability (an echoed first token) get nulls. `text_offset` is the position of the
        first token's text in the choice's text.
        """
        records: list[Logprob | None] = [None] * (len(token_ids) - len(logprobs))
        records += logprobs
        widths = map(self._token_width, token_ids)
        return CompletionLogprobs(
            tokens=[self._token_name(token) for token in token_ids],
            token_logprobs=[None if r is None else clamp_logprob(r.logprob) for r in records],
            top_logprobs=[None if r is None else self._logprobs_by_name(r) for r in records],
            text_offset=list(itertools.accumulate(widths, initial=text_offset))[:-1],
        )

    def text_width(self, token_ids: list[int]) -> int:
        """Return by how many characters `token_ids` advance the text offset."""
        return sum(map(self._token_width, token_ids))

    def _token_width(self, token: int) -> int:
        return 0 if token in self._hidden_token_ids else len(self._tokenizer.token_text(token))

    def _logprobs_by_name(self, record: Logprob) -> dict[str, float]:
        by_name: dict[str, float] = {}
        for token, logprob in [(record.token, record.logprob), *record.top_logprobs]:
            by_name.setdefault(self._token_name(token), clamp_logprob(logprob))
        return by_name

    def format_prompt(self, logprobs: list[Logprob]) -> PromptLogprobs:
        """Format vLLM's `prompt_logprobs`: candidates by id for each prompt token, null for the first."""
        return [None, *(self._format_candidates(record) for record in logprobs)]

    def _format_candidates(self, record: Logprob) -> dict[int, PromptLogprob]:
        candidates = {
            token: self._format_candidate(token, logprob, rank)
            for rank, (token, logprob) in enumerate(record.top_logprobs, 1)
        }
        candidates[record.token] = self._format_candidate(record.token, record.logprob, record.rank)
        return candidates

    def _format_candidate(self, token: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(
            logprob=clamp_logprob(logprob),
            rank=rank,
            decoded_token=self._tokenizer.token_text(token),
        )
