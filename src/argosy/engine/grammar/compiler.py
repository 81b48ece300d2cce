"""Compiler of grammars for a tokenizer, with a cache. A hostile grammar fails here, and not in the batch."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from argosy.constraints import MAX_GRAMMAR_TEXT_BYTES
from argosy.engine.grammar.token_mask import build_mask

COMPILE_THREADS = 2
"""Threads that compile. With two, a slow grammar does not block the next one."""
MAX_LEXER_STATES = 20_000
"""States to which the outputs of one grammar may grow its lexer. This many take 6 MB, and are kept with the grammar."""
MAX_CACHED_GRAMMARS = 64
MAX_CACHED_BYTES = 16 << 20
"""Largest total length of the cached grammar texts."""
MAX_UNSHARED_COMPILE_S = 0.1
"""Longest compilation that is repeated while a batch waits."""
TRIAL_STEPS = 2
"""Masks that are computed when a grammar is compiled, because some grammars fail only then."""
_JSON_DOCUMENT = re.compile(r'\{"grammars": ?\[\{("name": ?"\w+", ?)?"json_schema":')
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    step_max_items=20_000,
    initial_lexer_fuel=300_000,
    step_lexer_fuel=200_000,
    max_lexer_states=MAX_LEXER_STATES,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Limits of the parser. They bound one mask to some ten milliseconds, and compilation to some seconds."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled. The message is one line and names the reason."""


class CompiledGrammar:
    """Grammar compiled for one tokenizer. Thread-safe.

    Its matchers share a cache of lexer states, which makes later masks fast. The limits apply to the shared cache, so
    one output can exhaust it for all. A matcher that fails is therefore replaced by one with a cache of its own, whose
    result depends on its own output only.
    """

    def __init__(
        self, tokenizer: GrammarTokenizer, text: str, prototype: LLMatcher, compile_s: float
    ) -> None:
        self.tokenizer = tokenizer
        self.is_exhausted = False
        """Whether a matcher has failed, so that new requests need a new compilation."""
        self.is_json = _JSON_DOCUMENT.match(text) is not None
        """Whether the whole output is one JSON document."""
        self._text = text
        self._prototype = prototype
        self._compile_s = compile_s

    def create_matcher(self) -> LLMatcher:
        """Return a matcher at the start of the grammar, which shares the cache."""
        return self._prototype.deep_copy()

    def create_unshared_matcher(self) -> LLMatcher | None:
        """Return a matcher that shares nothing, after another one has failed.

        Returns None if compilation is slow, because the caller delays the whole batch.
        """
        self.is_exhausted = True
        if self._compile_s > MAX_UNSHARED_COMPILE_S:
            return None
        return _create_matcher(self.tokenizer, self._text)


class GrammarCompiler:
    """Compiles grammar texts in threads, each text once.

    A compiled grammar stays available to `find` while the cache or a caller holds it. Thread-safe.
    """

    def __init__(self, load_tokenizer: Callable[[], GrammarTokenizer]) -> None:
        """Create a compiler. `load_tokenizer` is called once, in a compiler thread, before the first grammar."""
        self._load_tokenizer = load_tokenizer
        self._tokenizer: GrammarTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar-compiler")
        self._cache: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        """Grammars by text, least recently used first. A grammar that failed is cached as well."""
        self._cached_bytes = 0
        self._available: WeakValueDictionary[str, CompiledGrammar] = WeakValueDictionary()
        self.compiles = 0
        """Grammars compiled, including failed ones."""
        self.cache_hits = 0
        self.compile_s = 0.0
        """Seconds spent on compiling, without loading the tokenizer."""

    def warm_up(self) -> Future[object]:
        """Load the tokenizer in a compiler thread."""
        return self._threads.submit(self._get_tokenizer)

    def submit(self, text: str) -> Future[CompiledGrammar]:
        """Return the future of a compiled grammar. Its exception is a `GrammarError` if the grammar cannot be used."""
        with self._lock:
            future = self._cache.get(text)
            if future is not None and _is_reusable(future):
                self._cache.move_to_end(text)
                self.cache_hits += 1
                return future
            available = self._available.get(text)
            if available is not None and not available.is_exhausted:  # evicted, but in use
                self.cache_hits += 1
                future = Future()
                future.set_result(available)
            else:
                future = self._threads.submit(self._compile, text)
            if self._cache.pop(text, None) is None:
                self._cached_bytes += len(text)
            self._cache[text] = future
            self._evict()
            return future

    def find(self, text: str) -> CompiledGrammar:
        """Return a grammar whose future is done and whose result is still referenced.

        Raises:
            KeyError: The grammar is not available.
        """
        return self._available[text]

    def drop_cached(self) -> int:
        """Drop the cached grammars, and return their number. Those in use stay available."""
        with self._lock:
            compiled = [text for text, future in self._cache.items() if future.done()]
            for text in compiled:
                del self._cache[text]
                self._cached_bytes -= len(text)
            return len(compiled)

    def close(self) -> None:
        """Stop the threads. Grammars that wait for compilation are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _evict(self) -> None:
        exhausted = [text for text, future in self._cache.items() if not _is_reusable(future)]
        for text in exhausted:  # each holds the memory of a full lexer
            del self._cache[text]
            self._cached_bytes -= len(text)
        while len(self._cache) > 1 and (
            len(self._cache) > MAX_CACHED_GRAMMARS or self._cached_bytes > MAX_CACHED_BYTES
        ):
            text, _ = self._cache.popitem(last=False)
            self._cached_bytes -= len(text)

    def _get_tokenizer(self) -> GrammarTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
            return self._tokenizer

    def _compile(self, text: str) -> CompiledGrammar:
        tokenizer = self._get_tokenizer()
        started_at = time.perf_counter()
        try:
            prototype = _compile(tokenizer, text)
        finally:
            compile_s = time.perf_counter() - started_at
            with self._lock:
                self.compiles += 1
                self.compile_s += compile_s
        compiled = CompiledGrammar(tokenizer, text, prototype, compile_s)
        with self._lock:
            self._available[text] = compiled
        return compiled


def describe_matcher_error(matcher: LLMatcher) -> str:
    """Return the first line of a matcher's error. Later lines quote the output."""
    lines = matcher.get_error().splitlines()
    return lines[0] if lines else "the matcher gave no reason"


def _create_matcher(tokenizer: GrammarTokenizer, text: str) -> LLMatcher:
    return LLMatcher(tokenizer.native, text, log_level=0, limits=LIMITS)


def _compile(tokenizer: GrammarTokenizer, text: str) -> LLMatcher:
    """Compile a grammar, and follow it for some tokens.

    Raises:
        GrammarError: The grammar is invalid or exceeds the limits.
    """
    if len(text) > MAX_GRAMMAR_TEXT_BYTES:
        raise GrammarError(
            f"its {len(text)} characters exceed the limit of {MAX_GRAMMAR_TEXT_BYTES}"
        )
    prototype = _create_matcher(tokenizer, text)
    matcher = prototype.deep_copy()
    mask = allocate_token_bitmask(1, tokenizer.native.vocab_size)
    for _ in range(TRIAL_STEPS):
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, mask)
        if matcher.is_error():
            raise GrammarError(describe_matcher_error(matcher))
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little"))
        tokens = allowed[allowed < tokenizer.vocab_size]
        if not tokens.size:
            break
        matcher.consume_token(int(tokens[0]))
    return prototype


def _is_reusable(future: Future[CompiledGrammar]) -> bool:
    """Return whether a cached result is still valid. An error such as a lack of memory may have passed."""
    if not future.done():
        return True
    if future.cancelled():
        return False
    error = future.exception()
    return isinstance(error, GrammarError) if error else not future.result().is_exhausted


END_TOKEN_NAME = b"<|end-of-grammar|>"
"""Name of the token id that stands for the end of the output in masks. It is no token of the model."""
MAX_CACHED_ENCODINGS = 4096
"""Number of forced texts, such as `": "`, whose tokens are kept."""


class TokenTable(Protocol):
    """Properties of a tokenizer that the conversion requires."""

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens that were added to the vocabulary, special or not."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, or no bytes for an unknown id."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: FBT001, FBT002 - Hugging Face's signature
        """Encode `text` to token ids."""
        ...


@dataclass(frozen=True, slots=True)
class GrammarTokenizer:
    """Tokenizer in the format of llguidance. Thread-safe."""

    native: LLTokenizer
    vocab_size: int
    """Vocabulary size of the model. The id `vocab_size` stands for the end of the output in masks."""
    added_ids: frozenset[int]
    """Ids that text never contains. A grammar allows them only by name."""
    token_mask: NDArray[np.int32]
    """Mask of the ids that are tokens, without the padding of the model's vocabulary. Do not modify it."""
    token_sizes: NDArray[np.int32]
    """Bytes of each token."""
    ids_by_byte: Mapping[bytes, int]
    """Ids of the tokens of one byte."""


def build_grammar_tokenizer(tokenizer: TokenTable, vocab_size: int) -> GrammarTokenizer:
    """Convert `tokenizer` for a model with `vocab_size` logits. Takes about a second for 150,000 tokens.

    Every added token counts as special, so that a text or a JSON string never contains it. Padding ids of the model's
    vocabulary have no bytes and are never allowed. The end of the output has an id of its own, because a model may have
    several end-of-sequence ids, and a grammar may name one of them.
    """
    added_ids = frozenset(i for i in tokenizer.added_ids if i < vocab_size)
    adapter = _TokenizerAdapter(tokenizer, vocab_size, added_ids)
    native = LLTokenizer(TokenizerWrapper(adapter))
    adapter.native = native
    pieces = adapter.tokens[:vocab_size]
    sizes = np.array([len(piece) for piece in pieces], np.int32)
    ids_by_byte = {
        piece: i for i, piece in enumerate(pieces) if len(piece) == 1 and i not in added_ids
    }
    mask = build_mask(sizes > 0)
    return GrammarTokenizer(native, vocab_size, added_ids, mask, sizes, ids_by_byte)


class _TokenizerAdapter:
    """Object with the attributes that `llguidance.TokenizerWrapper` reads. It encodes texts that a grammar forces."""

    bos_token_id = None

    def __init__(self, tokenizer: TokenTable, vocab_size: int, added_ids: frozenset[int]) -> None:
        self.eos_token_id = vocab_size
        self.tokens: Sequence[bytes] = [
            *(tokenizer.token_bytes(token_id) for token_id in range(vocab_size)),
            END_TOKEN_NAME,
        ]
        self.special_token_ids = [*sorted(added_ids), vocab_size]
        self.native: LLTokenizer | None = None
        self._tokenizer = tokenizer
        self._added_ids = added_ids
        self._encode_cached = lru_cache(MAX_CACHED_ENCODINGS)(self._encode)

    def __call__(self, text: bytes | str) -> list[int]:
        """Encode a text as the model's training data was encoded, if that spells exactly the text."""
        return list(self._encode_cached(text.decode() if isinstance(text, bytes) else text))

    def _encode(self, text: str) -> tuple[int, ...]:
        ids = self._tokenizer.encode(text, False)  # noqa: FBT003 - Hugging Face's signature
        spelled = b"".join(
            b"" if i in self._added_ids or i >= self.eos_token_id else self.tokens[i] for i in ids
        )
        if spelled == text.encode():
            return tuple(ids)
        # A SentencePiece tokenizer puts a space before the text, and an added token's name may occur in the text.
        return tuple(self.native.greedy_tokenize(text)) if self.native is not None else ()
