"""Reader of the small JSON files of a checkpoint that the text side needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


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
