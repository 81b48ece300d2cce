"""Text for calibration and measurement: documents of a file, divided by their content, so that none is in both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from argosy.engine.serving.text import ChatTemplate, Tokenizer
from argosy.protocol import ApiError

BUILTIN = "builtin"
BUILTIN_FILE = Path(__file__).with_name("builtin.jsonl")
"""Text of the kind that the bundled model was trained on, which it has not seen."""
MAX_LINE_BYTES = 16 << 20
MAX_DOCUMENT_TOKENS = 2048
"""Tokens to which documents are cut."""
MIN_CALIBRATION_TOKENS = 256
MIN_MEASURED_TOKENS = 64
MEASURED_SHARE = 4
"""Number of documents of which one is measured. The others calibrate."""


class _Document(msgspec.Struct, frozen=True):
    text: str | None = None
    messages: list[dict[str, object]] | None = None


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Token ids of documents."""

    calibration: list[list[int]] = field(default_factory=list)
    measured: list[list[int]] = field(default_factory=list)
    digest: str = ""
    """SHA-256 of the measured documents."""


def read_calibration_text(
    source: str, model: Path, calibration_tokens: int, measured_tokens: int
) -> CalibrationText:
    """Read documents until there are enough tokens for calibration and for measurement.

    Each line of the file is a JSON object with `text`, or with `messages` for the model's chat template. The hash of a
    document decides whether it is measured, so equal documents are never divided.

    Args:
        source: Path of the file, or `builtin`.
        model: Directory of the model.
        calibration_tokens: Number of tokens after which no document for calibration is added.
        measured_tokens: The same for measurement.

    Raises:
        ValueError: The file cannot be used. The message names it, and the line.
    """
    file = BUILTIN_FILE if source == BUILTIN else Path(source).expanduser()
    tokenizer, template = Tokenizer.load(model), ChatTemplate.load(model)
    calibration: list[list[int]] = []
    measured: list[list[int]] = []
    digest = hashlib.sha256()
    missing = [calibration_tokens, measured_tokens]
    seen: set[bytes] = set()
    for text, is_rendered in _read_documents(file, template):
        content = hashlib.sha256(text.encode()).digest()
        is_measured = content[0] % MEASURED_SHARE == 0
        if content in seen or missing[is_measured] <= 0:
            continue
        seen.add(content)
        ids = tokenizer.encode(text, add_special_tokens=not is_rendered)[:MAX_DOCUMENT_TOKENS]
        if len(ids) < 2:
            continue
        missing[is_measured] -= len(ids)
        if is_measured:
            digest.update(content)
        (measured if is_measured else calibration).append(ids)
        if max(missing) <= 0:
            break
    for documents, minimum, purpose in (
        (calibration, MIN_CALIBRATION_TOKENS, "calibration"),
        (measured, MIN_MEASURED_TOKENS, "measurement"),
    ):
        count = sum(map(len, documents))
        if count < minimum:
            raise ValueError(
                f"{file} has {len(documents)} documents with {count} tokens for {purpose}, which needs {minimum}; "
                f"add different documents, of which about one in {MEASURED_SHARE} is measured"
            )
    return CalibrationText(calibration, measured, f"sha256:{digest.hexdigest()}")


def _read_documents(file: Path, template: ChatTemplate) -> Iterator[tuple[str, bool]]:
    """Yield the texts of a file's documents, and whether the chat template rendered them."""
    decoder = msgspec.json.Decoder(_Document)
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), 1):
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(
                        f"{file}:{number}: the line has more than {MAX_LINE_BYTES >> 20} MiB; divide the document"
                    )
                if line.strip():
                    yield _read_text(decoder, line, template, f"{file}:{number}")
    except OSError as error:
        raise ValueError(
            f"cannot read the calibration file {file}: {error.strerror}; give a file of JSON lines, or {BUILTIN}"
        ) from error


def _read_text(
    decoder: msgspec.json.Decoder[_Document], line: bytes, template: ChatTemplate, where: str
) -> tuple[str, bool]:
    try:
        document = decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(
            f'{where}: {error}; each line is a JSON object with "text" or "messages"'
        ) from error
    if document.text is not None:
        return document.text, False
    if not document.messages:
        raise ValueError(
            f'{where}: the document has neither "text" nor "messages"; add one of them'
        )
    if not all(isinstance(message.get("role"), str) for message in document.messages):
        raise ValueError(f'{where}: a message has no "role"; add system, user or assistant')
    try:
        return template.render(document.messages, add_generation_prompt=False), True
    except ApiError as error:
        raise ValueError(f"{where}: {error.message}") from error
