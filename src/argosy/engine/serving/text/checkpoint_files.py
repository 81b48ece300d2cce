"""Small files of a checkpoint that the text side needs: special tokens, declared tokens, tokenizer description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog
import tokenizers

from argosy.engine.serving.text.gguf_text import read_gguf_special_tokens

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
DEFAULT_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""Class of transformers for a tokenizer whose files name none."""
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
_LIST_FIELDS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)


def read_json_object(file: Path) -> dict[str, Any]:
    """Read the JSON object in `file`, or return an empty one if the file does not exist.

    Raises:
        ValueError: The file is not a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not a JSON object ({error}); download it again") from error


def read_special_tokens(path: Path) -> dict[str, str]:
    """Read the named special tokens (`bos_token`, `eos_token`, ...) of a checkpoint directory or GGUF file."""
    if path.is_file():
        return read_gguf_special_tokens(path)
    config = read_json_object(path / SPECIAL_TOKENS_FILE) | read_json_object(path / CONFIG_FILE)
    special_tokens = {}
    for name in SPECIAL_TOKEN_NAMES:
        match config.get(name):
            case str(text) | {"content": str(text)}:
                special_tokens[name] = text
    return special_tokens


def read_tokenizer_info(path: Path, chat_template: str | None) -> dict[str, Any]:
    """Return the settings of tokenizer_config.json, with special tokens as text and the chat template in use.

    Names of files are left out, since they exist only on this machine.

    Args:
        path: Directory of the checkpoint, or GGUF file.
        chat_template: Source of the chat template in use.
    """
    config = {} if path.is_file() else read_json_object(path / CONFIG_FILE)
    settings = {
        name: value
        for name, value in config.items()
        if not name.endswith("_file") and name not in {"name_or_path", "chat_template"}
    }
    info = {"tokenizer_class": DEFAULT_TOKENIZER_CLASS} | settings | read_special_tokens(path)
    return info if chat_template is None else info | {"chat_template": chat_template}


@dataclass(frozen=True, slots=True)
class _DeclaredToken:
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
            pending.append(_DeclaredToken(token))
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


def _numbered_tokens(path: Path) -> Iterator[_DeclaredToken]:
    """Yield the tokens with ids, sorted by id: those of tokenizer_config.json, else those of added_tokens.json."""
    file = path / CONFIG_FILE
    entries = read_json_object(file).get("added_tokens_decoder")
    if entries is not None:
        if not isinstance(entries, dict):
            raise _malformed(file, entries)
        for token_id, entry in sorted(entries.items(), key=lambda item: _token_id(file, item[0])):
            yield _DeclaredToken(_parse_token(file, entry), _token_id(file, token_id))
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
        yield _DeclaredToken(token, legacy_id)


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


def _raise_misplaced(path: Path, item: _DeclaredToken, next_id: int) -> None:
    raise ValueError(
        f"{path / CONFIG_FILE} gives the token {item.token.content!r} the id {item.stated_id}, but tokenizer.json has "
        f"no such token and its next free id is {next_id}; the files belong to different tokenizers, fetch them again"
    )
