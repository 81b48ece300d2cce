"""The alert rules of the documentation are rules for Prometheus."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support.services import find_program

PAGE = Path(__file__).parents[2] / "docs/how-to/alerts.md"


def test_documented_alert_rules_pass_promtool(tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (rules,) = (block for block in blocks if "alert:" in block)
    path = tmp_path / "rules.yml"
    path.write_text(rules)
    command = [find_program("promtool", "prometheus"), "check", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
