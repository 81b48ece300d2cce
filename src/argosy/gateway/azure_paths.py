"""Paths of Azure OpenAI's API, which name the deployment and a version of the API."""

from __future__ import annotations

import re

_AZURE_PATH = re.compile(
    r"/openai/(?:deployments/(.+?)/((?:chat/)?completions|embeddings)|v1/(.+)|((?:models|responses)(?:/.+)?))"
)
"""Names of deployments may have slashes. Older versions of the API have no `v1`."""


def to_openai_path(path: str) -> str:
    """Return the path of OpenAI's API for one of Azure's, and other paths unchanged."""
    parsed = _AZURE_PATH.fullmatch(path)
    return path if parsed is None else f"/v1/{parsed[2] or parsed[3] or parsed[4]}"


def find_deployment(path: str) -> str | None:
    """Return the deployment in one of Azure's paths, which names the model of a request whose body names none."""
    parsed = _AZURE_PATH.fullmatch(path) if path.startswith("/openai/") else None
    return None if parsed is None else parsed[1]
