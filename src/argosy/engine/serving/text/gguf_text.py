"""Tokenizer, special tokens and chat template of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from argosy.engine.execution.checkpoint_formats.gguf_config import gguf_eos_token_ids
from argosy.engine.execution.checkpoint_formats.gguf_file import GgufFile, read_gguf
from argosy.engine.serving.text.byte_level_bpe import (
    GPT_4O_PATTERN,
    KIMI_PATTERN,
    LLAMA_3_PATTERN,
    QWEN_2_PATTERN,
    QWEN_35_PATTERN,
    TEKKEN_PATTERN,
    SpecialToken,
    build_byte_level,
    split_as_gpt2,
    split_by,
)
from argosy.engine.serving.text.sentencepiece_model import (
    PieceType,
    SentencePieceModel,
    VocabularyPiece,
    build_sentencepiece,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PREFIX = "tokenizer.ggml."
_GPT_2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEEPSEEK_3_PATTERNS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)
_DEEPSEEK_CODER_PATTERNS = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)
_FALCON_PATTERNS = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2_PATTERN, "[0-9][0-9][0-9]")
_DEFAULT_PATTERNS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    _GPT_2_PATTERN,
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)

KNOWN_PATTERNS = frozenset(
    (
        *(LLAMA_3_PATTERN, QWEN_2_PATTERN, QWEN_35_PATTERN, TEKKEN_PATTERN, GPT_4O_PATTERN),
        *(KIMI_PATTERN, *_DEEPSEEK_3_PATTERNS, *_DEEPSEEK_CODER_PATTERNS, *_FALCON_PATTERNS),
        *_DEFAULT_PATTERNS,
    )
)
"""Patterns of linear time. Their alternatives have an order in which no long match fails at its end."""


def _patterns(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: split_by(*patterns)


_BY_PATTERN: dict[tuple[str, ...], Callable[[], pre_tokenizers.PreTokenizer]] = {
    ("default",): _patterns(*_DEFAULT_PATTERNS),
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        *("lfm2", "jina-v5-nano", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"),
    ): _patterns(LLAMA_3_PATTERN),
    ("qwen2", "stablelm2", "megrez", "hunyuan", "grok-2", "deepseek-r1-qwen", "solar-open"): (
        _patterns(QWEN_2_PATTERN)
    ),
    ("qwen35",): _patterns(QWEN_35_PATTERN),
    ("tekken",): _patterns(TEKKEN_PATTERN),
    ("gpt-4o", "llama4", "kanana2"): _patterns(GPT_4O_PATTERN),
    ("kimi-k2",): _patterns(KIMI_PATTERN),
    ("deepseek-v3", "hunyuan-dense"): _patterns(*_DEEPSEEK_3_PATTERNS),
    ("deepseek-coder",): _patterns(*_DEEPSEEK_CODER_PATTERNS),
    ("falcon",): _patterns(*_FALCON_PATTERNS),
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"): split_as_gpt2,
    (
        *("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
    ): lambda: split_as_gpt2(single_digits=True),
}
_PRE_TOKENIZERS = {name: factory for names, factory in _BY_PATTERN.items() for name in names}
"""Pre-tokenizers by the name in `tokenizer.ggml.pre`, with the patterns of the models' tokenizer.json."""
_BOS_BY_DEFAULT = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"}
)
"""Pre-tokenizers of models whose texts start with `bos_token_id` if the file does not say."""


def load_gguf_tokenizer(path: Path) -> tuple[Tokenizer, list[int]]:
    """Build the tokenizer of a GGUF file.

    Returns:
        The tokenizer, and the ids of the tokens that end an answer.

    Raises:
        ValueError: The file has no tokenizer, or one that is not supported.
    """
    file = read_gguf(path)
    kind = file.metadata.get(f"{_PREFIX}model")
    try:
        if kind in ("llama", "t5"):
            tokenizer = _build_sentencepiece(file, is_unigram=kind == "t5")
        elif kind == "gpt2":
            tokenizer = _build_byte_level(file)
        else:
            raise ValueError(  # noqa: TRY301 - the same remedy
                f"{_PREFIX}model is {str(kind)[:80]!r}, and Argosy reads llama, gpt2 and t5"
            )
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the tokenizer of {path} cannot be used: {error}; convert the model again with a current llama.cpp, "
            "or use its safetensors checkpoint"
        ) from error
    return tokenizer, gguf_eos_token_ids(file)


def read_gguf_special_tokens(path: Path) -> dict[str, str]:
    """Return the named special tokens (`bos_token`, `eos_token`, ...) of a GGUF file."""
    file = read_gguf(path)
    tokens = file.metadata.get(f"{_PREFIX}tokens")
    named = {}
    for name, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        token_id = file.metadata.get(f"{_PREFIX}{key}")
        if (
            isinstance(tokens, list)
            and isinstance(token_id, int)
            and 0 <= token_id < len(tokens)
            and isinstance(tokens[token_id], bytes)
        ):
            named[name] = tokens[token_id].decode("utf-8", "replace")
    return named


def read_gguf_chat_template(path: Path) -> tuple[str | None, str | None]:
    """Return the chat template of a GGUF file, and that for conversations with tools, or None."""
    metadata = read_gguf(path).metadata
    templates = (metadata.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use"))
    source, tool_source = (text if isinstance(text, str) else None for text in templates)
    return source, tool_source


def _read_tokens(file: GgufFile) -> tuple[list[str], list[int]]:
    """Return texts and types of the tokens.

    Raises:
        ValueError: They are missing or damaged.
    """
    tokens = file.metadata.get(f"{_PREFIX}tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, bytes) for token in tokens):
        raise ValueError(f"{_PREFIX}tokens is missing or no list of texts")
    types = file.metadata.get(f"{_PREFIX}token_type")
    if types is None:
        types = np.full(len(tokens), PieceType.NORMAL)
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise ValueError(f"{_PREFIX}token_type does not fit {_PREFIX}tokens")
    return [token.decode() for token in tokens], types.tolist()


def _find_bos(file: GgufFile, tokens: list[str], *, default: bool) -> SpecialToken | None:
    adds_bos = file.metadata.get(f"{_PREFIX}add_bos_token")
    token_id = file.metadata.get(f"{_PREFIX}bos_token_id")
    if not (default if adds_bos is None else adds_bos) or not isinstance(token_id, int):
        return None
    if not 0 <= token_id < len(tokens):
        raise ValueError(f"{_PREFIX}bos_token_id is {token_id}, beyond the vocabulary")
    return SpecialToken(tokens[token_id], token_id)


def _build_sentencepiece(file: GgufFile, *, is_unigram: bool) -> Tokenizer:
    tokens, types = _read_tokens(file)
    scores: Any = file.metadata.get(f"{_PREFIX}scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise ValueError(f"{_PREFIX}scores does not fit {_PREFIX}tokens")
    adds_prefix_space = file.metadata.get(f"{_PREFIX}add_space_prefix", True)
    model = SentencePieceModel(
        pieces=[
            VocabularyPiece(*each) for each in zip(tokens, scores.tolist(), types, strict=True)
        ],
        is_unigram=is_unigram,
        has_byte_fallback=PieceType.BYTE in types,
        adds_prefix_space=bool(adds_prefix_space),
        removes_extra_spaces=bool(file.metadata.get(f"{_PREFIX}remove_extra_whitespaces", False)),
        character_map=_character_map(file),
    )
    return build_sentencepiece(model, bos=_find_bos(file, tokens, default=True))


def _character_map(file: GgufFile) -> bytes:
    value = file.metadata.get(f"{_PREFIX}precompiled_charsmap")
    return value.tobytes() if isinstance(value, np.ndarray) else b""


def _build_byte_level(file: GgufFile) -> Tokenizer:
    tokens, types = _read_tokens(file)
    name = file.metadata.get(f"{_PREFIX}pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise ValueError(f"{_PREFIX}pre is {str(name)[:80]!r}, which is not known")
    merges = file.metadata.get(f"{_PREFIX}merges")
    if not isinstance(merges, list):
        raise ValueError(f"{_PREFIX}merges is missing")  # noqa: TRY004 - the file is wrong
    pairs = []
    for merge in merges:
        left, _, right = merge.decode().partition(" ")
        pairs.append((left, right))
    specials = [
        SpecialToken(tokens[index], index, is_special=kind == PieceType.CONTROL)
        for index, kind in enumerate(types)
        if kind in (PieceType.CONTROL, PieceType.USER_DEFINED)
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError("two tokens have the same text")
    return build_byte_level(
        vocabulary,
        pairs,
        _PRE_TOKENIZERS[str(name)](),
        specials,
        _find_bos(file, tokens, default=name in _BOS_BY_DEFAULT),
        ignore_merges=name in _BOS_BY_DEFAULT,
    )
