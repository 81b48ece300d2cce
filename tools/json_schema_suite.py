"""Write the test data of the JSON-Schema-Test-Suite that tests of constraints read.

    python tools/json_schema_suite.py

The source distribution of `jsonschema` contains the suite. Pip downloads it; the output is
tests/unit/constraints/json_schema_suite.jsonl, one group of the suite on each line. The licence of the suite (MIT)
is in the file beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "tests/unit/constraints/json_schema_suite.jsonl"
RELEASE = "jsonschema==4.26.0"
DRAFTS = ("draft2020-12", "draft7")
OPTIONAL_FILES = ("ecmascript-regex.json", "non-bmp-regex.json", "float-overflow.json")


def download_release(directory: Path) -> Path:
    """Download the source distribution and return the directory of its suite."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        ":all:",
    ]
    subprocess.run([*command, "--dest", str(directory), RELEASE], check=True)
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    (suite,) = directory.glob("*/json/tests")
    return suite


def read_groups(suite: Path) -> Iterator[dict[str, Any]]:
    """Yield the groups of the drafts, without the descriptions of their documents."""
    for draft in DRAFTS:
        files = sorted((suite / draft).glob("*.json"))
        files += [suite / draft / "optional" / name for name in OPTIONAL_FILES]
        files += sorted((suite / draft / "optional/format").glob("*.json"))
        for file in files:
            if not file.exists():
                continue
            for group in json.loads(file.read_text(encoding="utf-8")):
                yield {
                    "draft": draft,
                    "file": str(file.relative_to(suite / draft).with_suffix("")),
                    "group": group["description"],
                    "schema": group["schema"],
                    "tests": [[test["data"], test["valid"]] for test in group["tests"]],
                }


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as directory:
        groups = list(read_groups(download_release(Path(directory))))
    lines = [json.dumps(group, separators=(",", ":")) for group in groups]
    OUTPUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(groups)} groups, {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
