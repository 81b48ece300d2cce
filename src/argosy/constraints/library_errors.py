"""Error messages of llguidance in a form for clients."""

from __future__ import annotations

import re

MAX_MESSAGE_CHARACTERS = 200
CROWDED_ROW = re.compile(r"Current row has (\d+) items; max is (\d+)")
SPECIAL_TOKENS = re.compile(r";? ?following special tokens are available:.*")


def shorten_error(error: str) -> str:
    """Return a message of llguidance as one bounded line without a dump of the parser's state."""
    lines = [line.strip() for line in error.split("<state>", maxsplit=1)[0].splitlines()]
    message = SPECIAL_TOKENS.sub("", next((line for line in lines if line), "unknown error"))
    if message.endswith("regex parse error:"):
        reasons = [line for line in lines if line.startswith("error:")]
        message = f"{message} {reasons[0].removeprefix('error:').strip()}" if reasons else message
    if row := CROWDED_ROW.search(message):
        message = (
            f"At one place, {row[1]} alternatives are possible; at most {row[2]} are supported"
        )
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[:MAX_MESSAGE_CHARACTERS] + "..."
    return message.rstrip(".") + "."
