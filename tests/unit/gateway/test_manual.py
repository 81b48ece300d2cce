"""docs/gateway.md says what there is: every setting with its default, every metric, and the codes that are given."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from argosy.gateway.config import load_config
from argosy.telemetry import GatewayGauges, GatewayMetrics, QuotaBackendGauges

ROOT = Path(__file__).parents[3]
ARGOSY = ROOT / "src/argosy"
MANUAL = (ROOT / "docs" / "gateway.md").read_text()
EXAMPLE, *_OTHERS = re.findall(r"^```yaml\n(.*?)^```$", MANUAL, re.MULTILINE | re.DOTALL)
NAME = re.compile(r"`([a-z_]+)`")


def missing(shown: object, told: object, path: str = "") -> Iterator[str]:
    """Settings of `told`, a struct, that `shown` lacks; both are one value."""
    if isinstance(told, list):
        yield from missing(shown[0], told[0], path) if isinstance(shown, list) else ()
    if not isinstance(told, msgspec.Struct):
        return
    assert isinstance(shown, dict)
    for name in told.__struct_fields__:
        if name in shown:
            yield from missing(shown[name], getattr(told, name), f"{path}{name}.")
        else:
            yield f"{path}{name}"


def test_every_setting_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(EXAMPLE)
    shown = msgspec.yaml.decode(EXAMPLE)
    (line,) = (line for line in EXAMPLE.splitlines() if line.endswith(": engines.md"))
    named = set(re.findall(r"[a-z_]+", line.partition(":")[0]))
    lacking = list(missing(shown, load_config(path)))
    assert {name.removeprefix("models.replicas.") for name in lacking} == named


def test_what_is_no_example_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("models: [{name: m, replicas: [{url: http://a}]}]")
    defaults = msgspec.json.decode(msgspec.json.encode(load_config(path)))
    examples = {line.partition(":")[0].strip() for line in EXAMPLE.splitlines() if "e.g." in line}

    def kept(settings: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if name not in examples}

    shown = kept(msgspec.yaml.decode(EXAMPLE))
    del shown["models"]
    for name, value in shown.items():
        known = defaults[name]
        if isinstance(value, dict):
            assert kept(value) == {key: known[key] for key in kept(value)}, name
        else:
            assert value == known, name


def test_every_metric_is_told() -> None:
    shared = QuotaBackendGauges(is_connected=True, degraded_allowed=0, degraded_rejected=0)
    reading = GatewayGauges(store_up=True, quota_backend=shared)
    shown = GatewayMetrics().exposition(reading).decode()
    there = set(re.findall(r"^# TYPE (\S+)", shown, re.MULTILINE))
    assert set(re.findall(r"\bargosy_[gs]\w+", MANUAL)) == there


def test_every_event_that_is_told_is_logged() -> None:
    (_, rows) = MANUAL.split("## When something is wrong\n")
    told = {name for name in NAME.findall(rows.partition("\n## ")[0]) if "_" in name}
    logged = set(re.findall(r'log\.\w+\(\s*"(\w+)"', source("gateway", "store")))
    assert told - logged == {"first_token_timeout_s", "stream_idle_timeout_s"}


def test_the_rules_of_prometheus_are_rules(tmp_path: Path) -> None:
    (rules,) = (block for block in _OTHERS if "alert:" in block)
    path = tmp_path / "rules.yml"
    path.write_text(rules)
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    checked = [promtool, "check", "rules", str(path)]
    done = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def source(*rooms: str) -> str:
    files = [path for room in rooms for path in (ROOT / "src/argosy" / room).rglob("*.py")]
    return "".join(path.read_text() for path in files)


def codes() -> set[tuple[str, str]]:
    """Statuses and codes of refusals that the manual tells."""
    rows = re.findall(r"^\| (\d{3}) \|([^|]*)\|", MANUAL, re.MULTILINE)
    return {(status, code) for status, row in rows for code in NAME.findall(row)}


def test_every_code_is_given() -> None:
    there = source("")
    assert {code for _, code in codes() if f'"{code}"' not in there} == set()


def test_every_code_that_is_given_is_told() -> None:
    given = re.findall(r'ApiError\(\s*(\d{3}),\s*"([a-z_]+)"', source("gateway", "web"))
    assert set(given) - codes() == set()
