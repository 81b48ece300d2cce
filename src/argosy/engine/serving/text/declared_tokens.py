"""Tokens that a checkpoint declares outside tokenizer.json, and that are added to the tokenizer as in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import tokenizers

from argosy.engine.serving.text.checkpoint_files import read_json_object

CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
_LIST_FIELDS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DeclaredToken:
    """Token, and the id that its file states, if any."""

    token: tokenizers.AddedToken
    stated_id: int | None = None


def add_declared_tokens(
    path: Path, backend: tokenizers.Tokenizer, embedded_tokens: int | None
) -> None:
    """Add the tokens that tokenizer_config.json and older files declare, and update the flags of known ones.

    A token without a row in the embedding is not added. Its text is encoded like any other.

    Args:
        path: Directory of the checkpoint.
        backend: Tokenizer of tokenizer.json.
        embedded_tokens: Rows of the model's embedding. None if unknown.

    Raises:
        ValueError: A file is malformed, or a token would get another id than its file states.
    """
    known = backend.get_added_tokens_decoder()
    known_reprs = set(map(repr, known.values()))
    contents = {token.content for token in known.values()}
    pending = [item for item in _numbered_tokens(path) if repr(item.token) not in known_reprs]
    contents.update(item.token.content for item in pending)
    for token in _named_tokens(path):
        if token.content not in contents:
            contents.add(token.content)
            pending.append(DeclaredToken(token))
    if not pending:
        return
    next_id = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    added, not_embedded = [], []
    for item in pending:
        content = item.token.content
        if backend.token_to_id(content) is None:
            if item.stated_id is not None and item.stated_id != next_id:
                _raise_misplaced(path, item, next_id)
            if embedded_tokens is not None and next_id >= embedded_tokens:
                not_embedded.append(content)
                continue
            next_id += 1
            added.append(content)
        backend.add_tokens([item.token])
    if added:
        log.info("declared_tokens_added", path=str(path), tokens=added)
    if not_embedded:
        log.warning("declared_tokens_not_embedded", path=str(path), tokens=not_embedded)


def _numbered_tokens(path: Path) -> Iterator[DeclaredToken]:
    """Yield the tokens with ids, sorted by id: those of tokenizer_config.json, else those of added_tokens.json."""
    file = path / CONFIG_FILE
    entries = read_json_object(file).get("added_tokens_decoder")
    if entries is not None:
        if not isinstance(entries, dict):
            raise _malformed(file, entries)
        for token_id, entry in sorted(entries.items(), key=lambda item: _token_id(file, item[0])):
            yield DeclaredToken(_parse_token(file, entry), _token_id(file, token_id))
        return
    special = {token.content for token in _named_tokens(path)}
    legacy_file = path / ADDED_TOKENS_FILE
    legacy_ids = {
        _token_id(legacy_file, str(token_id)): content
        for content, token_id in read_json_object(legacy_file).items()
    }
    for legacy_id, content in sorted(legacy_ids.items()):
        is_special = content in special
        token = tokenizers.AddedToken(content, normalized=not is_special, special=is_special)
        yield DeclaredToken(token, legacy_id)


def _named_tokens(path: Path) -> Iterator[tokenizers.AddedToken]:
    """Yield the special tokens that have a name, such as `eos_token`, or are in a list of further ones."""
    config = read_json_object(path / CONFIG_FILE)
    if "added_tokens_decoder" not in config:
        config = read_json_object(path / SPECIAL_TOKENS_FILE) | config
    named = [value for name, value in config.items() if name.endswith("_token")]
    for field in _LIST_FIELDS:
        values = config.get(field)
        named += values.values() if isinstance(values, dict) else values or []
    for value in named:
        match value:
            case str(content) | {"content": str(content)} if content:
                flags = value if isinstance(value, dict) else {}
                yield _token(content, {**flags, "normalized": False, "special": True})


def _parse_token(file: Path, entry: object) -> tokenizers.AddedToken:
    if isinstance(entry, dict) and isinstance(entry.get("content"), str):
        return _token(entry["content"], entry)
    raise _malformed(file, entry)


def _token(content: str, flags: dict[Any, Any]) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(content, **{name: bool(flags.get(name)) for name in _FLAGS})


def _token_id(file: Path, text: str) -> int:
    if not text.isdecimal():
        raise _malformed(file, text)
    return int(text)


def _malformed(file: Path, value: object) -> ValueError:
    return ValueError(
        f"{file}: the added_tokens_decoder or the list of added tokens has {str(value)[:80]!r}, "
        "which is no token id or no object with the field content; correct it"
    )


def _raise_misplaced(path: Path, item: DeclaredToken, next_id: int) -> None:
    raise ValueError(
        f"{path / CONFIG_FILE} gives the token {item.token.content!r} the id {item.stated_id}, but tokenizer.json has "
        f"no such token and its next free id is {next_id}; the files belong to different tokenizers, fetch them again"
    )
