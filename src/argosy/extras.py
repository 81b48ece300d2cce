"""Optional parts of the installation, and the command that installs one."""

from __future__ import annotations

from typing import Literal

Extra = Literal[
    "engine", "transformers", "gpu", "postgres", "redis", "s3", "kubernetes", "ray", "grpc", "cold"
]
"""Extra of pyproject.toml with what a part of the program needs at run time."""


def install_command(extra: Extra) -> str:
    """Return the command that adds an extra to the environment of a checkout.

    Argosy is in no package index, so a command with its name alone would install what a stranger has registered there.
    """
    return f".venv/bin/pip install -c constraints.txt -e '.[{extra}]'"
