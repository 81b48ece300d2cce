"""Version of the running program."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

VERSION: Final = version("argosy")
"""Version that was installed when the process started. A later installation does not change it."""
