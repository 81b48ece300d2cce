"""Constraint on the tokens of one sequence: its reasoning block, then its grammar, and limits on single tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from argosy.engine.grammar.compiler import CompiledGrammar, describe_matcher_error
from argosy.engine.grammar.document_closer import WINDOW_TOKENS, DocumentCloser
from argosy.engine.grammar.token_mask import ALL_TOKENS, clear_bits, full_mask, has_bit, set_bits
from argosy.engine.reasoning_gate import ReasoningGate
from argosy.protocol import SamplingParams

DEAD_END_CODE = "grammar_dead_end"
"""Error code of a sequence that no token can continue."""
DEAD_END_MESSAGE = (
    "no token can continue the output: the grammar allows none, the model has no end-of-sequence token, or "
    "allowed_token_ids and banned_token_ids exclude all that the grammar allows"
)


def is_constrained(params: SamplingParams) -> bool:
    """Return whether a sequence needs a `TokenConstraint`, which then applies all its limits on single tokens."""
    return bool(params.grammar) or (
        params.reasoning is not None and params.reasoning.budget is not None
    )


def end_token_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Return the tokens that end a sequence.

    A grammar that is complete leaves nothing but an end-of-sequence token, so this token ends the sequence even with
    `ignore_eos`.
    """
    if params.ignore_eos and not params.grammar:
        return frozenset(params.stop_token_ids)
    return frozenset((*params.stop_token_ids, *eos_token_ids))


class TokenConstraint:
    """State of one constrained sequence, a pure function of its parameters and its output tokens.

    The sequence's mask allows the tokens that continue its grammar. The limits on single tokens (`allowed_token_ids`,
    `banned_token_ids`, `min_tokens`) are part of the mask:

    * End tokens are allowed where the grammar accepts the output. If nothing else is possible, no limit excludes them.
    * Inside a reasoning block, everything but an end token is allowed. The grammar starts after the block.
    * A used-up reasoning budget allows only the token that continues the block's closing sequence.
    * A JSON document is closed when its limit of tokens comes (see `DocumentCloser`).

    A sequence without any allowed token has a `failure`. Not thread-safe.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        grammar: CompiledGrammar | None,
        eos_token_ids: Iterable[int],
    ) -> None:
        """Create the state before the first output token. `grammar` is the compiled `params.grammar`, if any."""
        self._vocab_size = vocab_size
        self._min_tokens = params.min_tokens
        self._grammar = grammar
        self._matcher = None if grammar is None else grammar.create_matcher()
        self._max_tokens = params.max_tokens or 0
        self._closer = None
        if grammar is not None and grammar.is_json and self._max_tokens and not params.min_tokens:
            self._closer = DocumentCloser(grammar)
        self._gate = None if params.reasoning is None else ReasoningGate(params.reasoning)
        self._is_off_grammar = False
        """Whether the output is the beginning of a block's opening sequence, and nothing that the grammar allows."""
        self._grammar_tokens: list[int] = []
        """Tokens that the matcher has consumed."""
        self._is_unshared = False
        """Whether the matcher has replaced one that failed."""
        self._end_ids = end_token_ids(params, eos_token_ids)
        known_end_ids = frozenset(i for i in self._end_ids if 0 <= i < vocab_size)
        closing_ids = () if params.reasoning is None else params.reasoning.end_ids
        self._known_end_ids = sorted(known_end_ids)
        self._limits = _build_limits(params, vocab_size, grammar)
        self._optional_end_ids = [
            i
            for i in self._known_end_ids
            if has_bit(self._limits, i)
            and not (params.ignore_eos and i not in params.stop_token_ids)
        ]
        """End tokens that are allowed where the grammar accepts the output but could also continue."""
        self._text_end_ids = (
            [] if grammar is None else sorted(known_end_ids - grammar.tokenizer.added_ids)
        )
        """End tokens that may be a part of texts. The other end tokens are in a grammar only by name."""
        self._reasoning_end_ids = sorted(known_end_ids.difference(closing_ids))
        self._output_len = 0
        self._has_ended = False
        self.failure: str | None = None
        """Why no token can be sampled, or None."""

    @property
    def active_matcher(self) -> LLMatcher | None:
        """Matcher whose mask `complete_row` expects in the row, or None if it expects nothing."""
        if self._has_ended or self.failure is not None or self._is_off_grammar:
            return None
        return None if self._gate is not None and self._gate.is_open else self._matcher

    def find_forced_tokens(self) -> list[int]:
        """Return tokens of the only text that can follow in the grammar. Other tokens of that text are allowed, too."""
        matcher = self.active_matcher
        return [] if matcher is None else matcher.compute_ff_tokens()

    def fork(self) -> TokenConstraint:
        """Return a copy that advances independently, for example by drafts."""
        forked = copy(self)
        vars(forked).update(
            _gate=copy(self._gate),
            _matcher=None if self._matcher is None else self._matcher.deep_copy(),
            _grammar_tokens=self._grammar_tokens.copy(),
        )
        return forked

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by output tokens. Tokens after an end token or a failed step (negative) have no effect."""
        for index, token in enumerate(tokens):
            if self._has_ended or self.failure is not None:
                return
            if self._gate is None or self._gate.is_past:
                self._accept_after_gate(tokens[index:])
                return
            self._output_len += 1
            if self._is_end(token):
                self._has_ended = True
            else:
                self._accept_at_gate(self._gate, token)

    def replace_failed_matcher(self) -> LLMatcher | None:
        """Replace the active matcher, which has failed, by one whose limits no other sequence has used up.

        Returns None, and sets `failure`, if that matcher fails as well.
        """
        matcher = self._matcher
        if matcher is None or self._grammar is None:
            return None
        unshared = None if self._is_unshared else self._grammar.create_unshared_matcher()
        if unshared is not None:
            self._is_unshared = True
            self._matcher = matcher = unshared
            matcher.consume_tokens(self._grammar_tokens)
        if unshared is None or matcher.is_error():
            self.failure = (
                f"the grammar cannot be followed any further: {describe_matcher_error(matcher)}"
            )
            return None
        return matcher

    def complete_row(self, row: NDArray[np.int32]) -> None:
        """Turn the active matcher's mask in `row` into the mask of the next token.

        Sets `failure` if no token is allowed. A sequence that failed or has ended gets a mask without effect.
        """
        if not self._has_ended and self.failure is None:
            self.failure = self._fill_row(row)
        if self._has_ended or self.failure is not None:
            row.fill(ALL_TOKENS)

    def _fill_row(self, row: NDArray[np.int32]) -> str | None:
        """Fill the mask of a sequence that goes on. Return why it cannot, or None."""
        gate = self._gate
        if gate is not None and gate.forced_token is not None:
            row.fill(0)
            set_bits(row, [gate.forced_token])
        elif gate is not None and gate.is_open:
            row[:] = self._limits
            if self._grammar is not None or self._is_early:
                clear_bits(row, self._reasoning_end_ids)
        elif self._matcher is not None:
            self._fill_grammar_row(row)
        else:
            row[:] = self._limits
            if self._is_early:
                clear_bits(row, self._known_end_ids)
        return None if np.count_nonzero(row) else DEAD_END_MESSAGE

    def _fill_grammar_row(self, row: NDArray[np.int32]) -> None:
        accepts = False
        if self._is_off_grammar:
            row.fill(0)
        else:
            accepts = has_bit(row, self._vocab_size)
            clear_bits(row, self._text_end_ids)
            row &= self._limits
            tokens_left = self._max_tokens - self._output_len
            closer, matcher = self._closer, self._matcher
            if closer is not None and matcher is not None and tokens_left <= WINDOW_TOKENS:
                closer.restrict(matcher, row, tokens_left)
        opening_token = None if self._gate is None else self._gate.opening_token
        if opening_token is not None:
            set_bits(row, [opening_token])
        if accepts:
            is_complete = not np.count_nonzero(row)
            if is_complete and self._matcher is not None and not self._matcher.is_accepting():
                return  # the library ends an output that nothing can continue, complete or not
            if is_complete or not self._is_early:
                set_bits(row, self._known_end_ids if is_complete else self._optional_end_ids)

    def _accept_after_gate(self, tokens: Sequence[int]) -> None:
        """Accept tokens after the reasoning block, up to the first end token."""
        for count, token in enumerate(tokens):
            if self._is_end(token):
                self._has_ended = True
                tokens = tokens[:count]
                break
        self._output_len += len(tokens)
        if self._matcher is not None:
            self._consume(self._matcher, list(tokens))

    def _accept_at_gate(self, gate: ReasoningGate, token: int) -> None:
        """Accept a token before the end of the reasoning block.

        While the opening sequence is incomplete, its tokens may also be the beginning of the constrained output. The
        matcher therefore follows them, and starts again once the block opens.
        """
        could_open = gate.may_open
        is_reasoning = gate.accept(token)
        if not could_open or self._grammar is None or self._matcher is None:
            return
        if gate.is_open:
            self._matcher = self._grammar.create_matcher()
            self._grammar_tokens = []
            self._is_off_grammar = False
        elif self._is_off_grammar or not self._matcher.validate_tokens([token]):
            self._is_off_grammar = True
            if not is_reasoning:
                self.failure = "the output neither follows the grammar nor opens a reasoning block"
        else:
            self._consume(self._matcher, [token])

    def _consume(self, matcher: LLMatcher, tokens: list[int]) -> None:
        self._grammar_tokens += tokens
        if not matcher.consume_tokens(tokens):
            self.replace_failed_matcher()

    @property
    def _is_early(self) -> bool:
        return self._output_len < self._min_tokens

    def _is_end(self, token: int) -> bool:
        return token < 0 or token in self._end_ids


def _build_limits(
    params: SamplingParams, vocab_size: int, grammar: CompiledGrammar | None
) -> NDArray[np.int32]:
    """Return the mask of the tokens that may occur anywhere in the output."""
    limits = full_mask(vocab_size) if grammar is None else grammar.tokenizer.token_mask.copy()
    if params.allowed_token_ids:
        allowed = full_mask(vocab_size)
        allowed.fill(0)
        set_bits(allowed, params.allowed_token_ids)
        limits &= allowed
    clear_bits(limits, params.banned_token_ids)
    return limits
