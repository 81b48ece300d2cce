"""Compare the hashes of some runs of the twin with those in the repository, on any version of Python.

    PYTHONPATH=src python3.13 -m tools.twin_hashes

The interpreter needs the project with its base packages (`pip install .`).
`--write` replaces the hashes after a decision of the product has changed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

from argosy.twin import change_scenario, read_scenario, run_scenario

ROOT = Path(__file__).parent.parent
SCENARIO = ROOT / "benchmarks" / "scenarios" / "chaos.yaml"
GOLDEN = ROOT / "tests" / "unit" / "twin" / "golden_hashes.json"
CHANGES = ("duration_s=40", "random_faults.per_minute=6", "pool.replicas=3")
SEEDS = range(1, 4)


def compute_hashes() -> dict[str, str]:
    """Return the hash of each run, by fidelity and seed."""
    hashes = {}
    for fidelity in ("macro", "exact"):
        scenario = change_scenario(read_scenario([SCENARIO]), [*CHANGES, f"fidelity={fidelity}"])
        for seed in SEEDS:
            hashes[f"{fidelity} {seed}"] = run_scenario(scenario, seed).trace_hash
    return hashes


def read_golden() -> dict[str, str]:
    """Return the hashes in the repository."""
    golden: dict[str, str] = json.loads(GOLDEN.read_text())
    return golden


def main() -> int:
    """Compare the hashes, or write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the hashes in the repository")
    is_written = parser.parse_args().write
    hashes = compute_hashes()
    if is_written:
        GOLDEN.write_text(json.dumps(hashes, indent=2) + "\n")
        return 0
    golden = read_golden()
    wrong = [name for name in golden if hashes.get(name) != golden[name]]
    print(
        f"Python {platform.python_version()}: {len(golden) - len(wrong)} of {len(golden)} hashes agree"
    )
    for name in wrong:
        print(f"{name}: {hashes.get(name)} in place of {golden[name]}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
