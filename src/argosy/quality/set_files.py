"""Readers of golden sets: own JSON, promptfoo's files, and rows of inspect-ai, OpenAI evals and ragas."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from argosy.quality.golden_set import (
    MAX_ITEMS,
    MAX_SET_BYTES,
    Assertion,
    GoldenItem,
    GoldenSet,
    JudgeLabel,
    decode_set,
)
from argosy.quality.promptfoo_files import read_cases, read_promptfoo
from argosy.settings import load_yaml

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ROW_FORMS = (
    "`input` and `target` (inspect-ai), `input` and `ideal` (OpenAI evals), or `user_input` and"
    " `reference` (ragas)"
)


def read_golden_set(path: Path, prompt: str | None = None) -> GoldenSet:
    """Read a golden set from a file, by its suffix and its keys. Code is never run.

    Args:
        path: JSON, YAML, CSV or JSONL file.
        prompt: Template for cases without prompts of their own, such as those of a CSV file.

    Raises:
        ValueError: The file cannot be used. The message names what is refused.
        OSError: The file cannot be read.
    """
    content = read_bounded(path)
    try:
        if path.suffix in {".csv", ".tsv"}:
            return GoldenSet(items=read_cases(path, content, prompt))
        if path.suffix == ".jsonl":
            return GoldenSet(items=_read_rows(_decode_lines(content)))
        document = load_yaml(content) if path.suffix in {".yaml", ".yml"} else _decode_json(content)
        if isinstance(document, dict) and "items" in document:
            return decode_set(msgspec.json.encode(document))
        if isinstance(document, list) and document and _is_row(document[0]):
            return GoldenSet(items=_read_rows(document))
        return read_promptfoo(path, document, prompt)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    except (AttributeError, KeyError, TypeError, csv.Error) as error:
        raise ValueError(f"{path}: a part has another form than it should ({error})") from error


def read_labels(path: Path) -> tuple[JudgeLabel, ...]:
    """Read labels of people for a judge: JSON lines with `rubric`, `input`, `output` and `score` from 0 to 1.

    Raises:
        ValueError: A line is invalid.
        OSError: The file cannot be read.
    """
    try:
        return msgspec.convert(_decode_lines(read_bounded(path)), tuple[JudgeLabel, ...])
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_bounded(path: Path) -> bytes:
    """Return the content of a file. Raises ValueError if it is larger than a golden set may be."""
    with path.open("rb") as file:
        content = file.read(MAX_SET_BYTES + 1)
    if len(content) > MAX_SET_BYTES:
        raise ValueError(f"{path}: it has more than {MAX_SET_BYTES:,} bytes; split it")
    return content


def _decode_json(content: bytes) -> Any:  # noqa: ANN401 - any document
    return msgspec.json.decode(content.removeprefix(b"\xef\xbb\xbf"))


def _decode_lines(content: bytes) -> list[Any]:
    lines = [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    if len(lines) > MAX_ITEMS:
        raise ValueError(f"it has more than {MAX_ITEMS:,} lines; split it")
    return [msgspec.json.decode(line) for line in lines]


def _is_row(row: object) -> bool:
    return isinstance(row, dict) and bool({"input", "user_input"} & row.keys())


def _read_rows(rows: Sequence[Any]) -> tuple[GoldenItem, ...]:
    items = []
    for number, row in enumerate(rows, 1):
        if not _is_row(row):
            raise ValueError(f"row {number}: it needs {_ROW_FORMS}")
        try:
            items.append(_read_row(row, f"{number}"))
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError(f"row {number}: {error}") from error
    return tuple(items)


def _read_row(row: Mapping[str, Any], number: str) -> GoldenItem:
    refused = sorted({"files", "sandbox", "setup"} & {key for key, value in row.items() if value})
    if refused:
        raise ValueError(
            f"`{refused[0]}` is refused, because it needs files or code beside the row"
        )
    metadata = row.get("metadata") or {}
    cluster = str(metadata.get("cluster", "")) if isinstance(metadata, dict) else ""
    if "user_input" in row:
        return _read_ragas(row, number, cluster)
    text, choices = row["input"], row.get("choices") or []
    wanted = row.get("target", row.get("ideal"))
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(wanted, list) or not wanted:
        raise ValueError(f"it needs {_ROW_FORMS}")
    if choices:
        if len(choices) > len(_LETTERS) or not isinstance(text, str):
            raise ValueError("`choices` needs a text as `input`, and at most 26 of them")
        listed = "\n".join(f"{_LETTERS[at]}) {choice}" for at, choice in enumerate(choices))
        text = f"{text}\n\n{listed}\n\nAnswer with the letter only."
        letters = "".join(each for each in wanted if each in _LETTERS[: len(choices)])
        if len(letters) != len(wanted):
            raise ValueError("`target` of a row with `choices` must be their letters")
        assertion = Assertion(type="regex", value=rf"^\W*[{letters}]\b")
    else:
        assertion = Assertion(type="contains-any", value=[str(each) for each in wanted])
    return GoldenItem(
        id=str(row.get("id", number)),
        messages=_as_messages(text),
        assertions=(assertion,),
        cluster=cluster,
    )


def _read_ragas(row: Mapping[str, Any], number: str, cluster: str) -> GoldenItem:
    contexts = row.get("retrieved_contexts") or row.get("reference_contexts") or []
    reference = row.get("reference")
    if not isinstance(reference, str):
        raise ValueError("a row of ragas needs a `reference`")  # noqa: TRY004 - of a file
    question = row["user_input"]
    if contexts and isinstance(question, str):
        joined = "\n\n".join(map(str, contexts))
        question = f"Answer by this context only.\n\n{joined}\n\nQuestion: {question}"
    rubric = f"The answer agrees in its facts with this reference: {reference}"
    return GoldenItem(
        id=str(row.get("id", number)),
        messages=_as_messages(question),
        assertions=(Assertion(type="llm-rubric", value=rubric),),
        # Questions about the same documents share what goes wrong with them.
        cluster=cluster or "\n".join(map(str, contexts))[:200],
    )


def _as_messages(value: object) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages = msgspec.convert(value, list[dict[str, Any]])
    return [
        {name: message[name] for name in ("role", "content") if name in message}
        for message in messages
    ]
