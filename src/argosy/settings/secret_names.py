"""Recognition of settings that hold secrets by their names, and of values that are secrets by their shape."""

from __future__ import annotations

import re

_SECRET_NAME = re.compile(
    r"(passwords?|passwd|passphrase|(^|[_-])(apikey|token|secrets?|credentials?|auth[_-]?tokens|"
    r"(api|access|secret|private|auth|encryption|signing)[_-]?keys?))$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"(sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abpr]-|AKIA)[A-Za-z0-9_-]{16,}|-----BEGIN [A-Z ]*PRIVATE KEY"
)


def is_secret_name(name: str) -> bool:
    """Return whether a setting or variable of this name holds a secret, such as `HF_TOKEN` or `api_key`."""
    return _SECRET_NAME.search(name) is not None


def is_secret_value(value: str) -> bool:
    """Return whether a text has the shape of a well-known kind of key or token."""
    return _SECRET_VALUE.search(value) is not None
