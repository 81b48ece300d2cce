"""The shape of the code: what its rules find in a small checkout, and what they leave alone."""

import subprocess
from pathlib import Path

import pytest
from tools.shape import measure

LONG = "def run():\n" + "    x = 1\n" * 60
FILES = {
    "src/argosy/__init__.py": "",
    "src/argosy/store/__init__.py": "__all__ = ['read']\nfrom argosy.store.tables import read\n",
    "src/argosy/store/tables.py": "from argosy.store import rows\n\nclass Row(Struct): ...\n",
    "src/argosy/store/rows.py": "from .tables import Row\n",
    "src/argosy/lists.py": LONG,
    "src/argosy/long.py": LONG + "    if x: pass\n" * 6,
    "tests/unit/store/test_tables.py": "import argosy.store.tables\n",
    "tests/unit/fleet/test_fleet.py": "from argosy.store import read, tables\n",
    "tests/integration/test_store.py": "from argosy.store import read\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    return tmp_path


def test_shape_names_foreign_private_imports_circles_and_long_functions(checkout: Path) -> None:
    numbers, places = measure(checkout)
    assert places == {
        "foreign private modules": ["tests/unit/fleet/test_fleet.py: argosy.store.tables"],
        "circles": ["argosy.store.rows, argosy.store.tables"],
        "long functions": ["src/argosy/long.py:1 run (67)"],
    }
    assert (numbers["files of source"], numbers["classes"]) == (6, 1)
    assert numbers["records (dataclass, Struct, NamedTuple, TypedDict)"] == 1
    assert numbers["types on the path"] is None
