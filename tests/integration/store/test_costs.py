"""Costs on both databases: exports and divisions of a cost sum to it exactly."""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from decimal import Decimal
from pathlib import Path

import duckdb
import pytest
from tests.integration.store.conftest import ACTOR, RULES, START
from tests.support.fake_clock import FakeClock
from tests.support.usage_rows import usage_row

from argosy.store import (
    FOCUS_VERSIONS,
    CostRow,
    FocusExport,
    FocusVersion,
    HardwareDay,
    LimitWindow,
    Organisation,
    Price,
    Project,
    Store,
    UsageFilter,
    compare_costs,
    list_budgets,
    list_outliers,
)
from argosy.usage_archive import UsageArchiveError, write_focus_parquet

DAY = 86_400.0
MIDNIGHT = START // DAY * DAY
MANDATORY_COLUMNS = (
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency"),
    *("BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass"),
    *("ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart", "ContractedCost"),
    *("EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit"),
    *("ProviderName", "PublisherName", "ServiceCategory", "ServiceName"),
)
"""Columns that FOCUS 1.2 requires. All but `ChargeClass` need a value in rows of usage."""


def read_focus(
    store: Store, version: FocusVersion = "1.2", where: UsageFilter | None = None
) -> list[dict[str, str]]:
    prices = store.limits_and_prices
    charges = FocusExport(store.ledger, store.accounts, prices, version, where or UsageFilter())
    return list(csv.DictReader("".join(charges.iter_csv()).splitlines()))


def to_nano(row: dict[str, str]) -> int:
    return int(Decimal(row["BilledCost"]) * 10**9)


def test_focus_export_sums_to_the_ledger(
    store: Store, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a price change at midnight, ended requests that paid nothing, several pages, and a roll-up."""
    monkeypatch.setattr("argosy.store.ledger.REPORT_PAGE_ROWS", 2)
    for since, factor in ((0.0, 1), (MIDNIGHT, 3)):
        price = Price(
            model="m", input=7 * factor, cached_input=factor, output=31 * factor, since=since
        )
        store.limits_and_prices.set_price(price, actor=ACTOR)
    owner = {"organisation": project.organisation, "project": project.id}
    rates = {-1: (7, 1, 31), 0: (21, 3, 93), 40: (21, 3, 93)}
    expected: Counter[str] = Counter()
    for number in range(30):
        day = (-1, 0, 40)[number % 3]
        tokens = (number * 1000 + 17, number * 10, number)
        costs = [tokens[0] - tokens[1], tokens[1], tokens[2]]
        costs = [count * rate for count, rate in zip(costs, rates[day], strict=True)]
        for kind, cost in zip(("input", "cached-input", "output"), costs, strict=True):
            expected[f"m/{kind}"] += cost
        record = usage_row(
            f"r{number}",
            **owner,
            key=f"k{number % 4}",
            ended_at=MIDNIGHT + day * DAY + number,
            **dict(zip(("input_tokens", "cached_tokens", "output_tokens"), tokens, strict=True)),
            nano_dollars=sum(costs),
        )
        store.ledger.add_records([record])
    refused = usage_row("free", **owner, status="refused", ended_at=MIDNIGHT, nano_dollars=0)
    odd = usage_row("odd", model="unpriced", ended_at=MIDNIGHT, nano_dollars=1_000_003)
    store.ledger.add_records([refused, odd])
    (total,) = store.ledger.report()
    for version in FOCUS_VERSIONS:
        rows = read_focus(store, version)
        assert sum(map(to_nano, rows)) == total.nano_dollars
        assert sum(int(row["ConsumedQuantity"]) for row in rows) == (
            total.input_tokens + total.output_tokens
        )
        priced = [row for row in rows if row["SubAccountId"] == project.id]
        sums: Counter[str] = Counter()
        for row in priced:
            sums[row["SkuId"]] += to_nano(row)
        assert sums == expected
        assert {row["BillingAccountName"] for row in priced} == {"Acme"}
        for row in rows:
            assert all(row[name] for name in MANDATORY_COLUMNS if name != "ChargeClass")
            assert Decimal(row["PricingQuantity"]) * 10**6 == int(row["ConsumedQuantity"])
            assert json.loads(row["SkuPriceDetails"])["TokenDirection"] in {"Input", "Output"}
        store.ledger.roll_up(MIDNIGHT + DAY)
    assert rows[0].keys() >= {"ServiceProviderName", "HostProviderName"}
    of_day = read_focus(store, where=UsageFilter(since=MIDNIGHT + 5, until=MIDNIGHT + 6))
    by_day = {row.day: row for row in store.ledger.report(["day"])}
    assert {row["ChargePeriodStart"] for row in of_day} == {"2025-11-21T00:00:00Z"}
    assert sum(map(to_nano, of_day)) == by_day["2025-11-21"].nano_dollars


@RULES
def test_focus_export_has_the_callers_organisation_only(
    store: Store, organisation: Organisation
) -> None:
    mine = usage_row("r1", organisation=organisation.id)
    store.ledger.add_records([mine, usage_row("r2", organisation="other")])
    scope = organisation.id
    charges = FocusExport(
        store.ledger.for_organisation(scope),
        store.accounts.for_organisation(scope),
        store.limits_and_prices.for_organisation(scope),
        "1.2",
    )
    rows = list(csv.DictReader("".join(charges.iter_csv()).splitlines()))
    assert {row["BillingAccountId"] for row in rows} == {scope}


def test_month_in_focus_sums_to_ledger_and_hardware_as_csv_and_parquet(
    store: Store, project: Project, tmp_path: Path
) -> None:
    """With failovers, requests whose price was refunded, a price change at midnight, and idle replicas."""
    for since, factor in ((0.0, 1), (MIDNIGHT, 3)):
        price = Price(
            model="m", input=7 * factor, cached_input=factor, output=31 * factor, since=since
        )
        store.limits_and_prices.set_price(price, actor=ACTOR)
    lease = store.fleets.acquire_lease("controller", store.fleets.read_lease("f"))
    assert lease is not None
    first_day = int(MIDNIGHT // DAY) - 15
    rng = random.Random(4)
    hardware = 0
    for number in range(30):
        day = first_day + number
        hardware += 1_000_003
        use = HardwareDay(
            day=day,
            pool="p",
            model="m",
            replica_ms=86_400_000,
            busy_ms=rng.randrange(86_400_000),
            nano_dollars=1_000_003,
        )
        store.hardware_costs.add(lease, [use])
        factor = 3 if day * DAY >= MIDNIGHT else 1
        rows = []
        for request in range(0 if number == 9 else rng.randrange(3, 9)):  # one day is quiet
            tokens = (rng.randrange(1, 5000), rng.randrange(0, 900), rng.randrange(0, 700))
            tokens = (tokens[0], min(tokens[:2]), tokens[2])
            cost = factor * (7 * (tokens[0] - tokens[1]) + tokens[1] + 31 * tokens[2])
            is_refunded = request == 1
            rows.append(
                usage_row(
                    f"r{number}-{request}",
                    project=rng.choice([project.id, "proj_b"]),
                    user=rng.choice(["ann", "bob"]),
                    # at the last and the first moment of a day
                    ended_at=day * DAY + (0.0 if request % 2 else DAY - 0.001),
                    status="interrupted" if is_refunded else "completed",
                    replica="second" if request == 2 else "first",  # after a failover
                    nano_dollars=0 if is_refunded else cost,
                    **dict(
                        zip(("input_tokens", "cached_tokens", "output_tokens"), tokens, strict=True)
                    ),
                )
            )
        store.ledger.add_records(rows)
    (total,) = store.ledger.report()
    charges = FocusExport(
        store.ledger,
        store.accounts,
        store.limits_and_prices,
        "1.2",
        hardware=store.hardware_costs,
    )
    rows_of_csv = list(csv.DictReader("".join(charges.iter_csv()).splitlines()))
    assert sum(map(to_nano, rows_of_csv)) == total.nano_dollars
    write_focus_parquet(charges, tmp_path / "month.parquet")
    query = f"""SELECT "SubAccountId", sum("BilledCost"), sum("x_AllocatedCost")
        FROM '{tmp_path / "month.parquet"}' GROUP BY 1"""  # noqa: S608 - a path of the test
    found = {project or "": costs for project, *costs in duckdb.execute(query).fetchall()}
    assert sum(billed for billed, _ in found.values()) * 10**9 == total.nano_dollars
    assert sum(caused for _, caused in found.values()) * 10**9 == hardware
    expected: dict[str, list[int]] = {}
    begin = first_day * DAY
    for each in compare_costs(store.ledger, store.hardware_costs, begin, begin + 30 * DAY):
        sums = expected.setdefault(each.project, [0, 0])
        sums[0] += each.billed
        sums[1] += each.caused
    assert {name: [int(each * 10**9) for each in costs] for name, costs in found.items()} == (
        expected
    )
    idle = [row for row in rows_of_csv if row["SkuId"] == "m/idle"]
    assert len(idle) == 30
    assert {row["BillingAccountId"] for row in idle} == {"operator"}
    for row in rows_of_csv:
        assert all(row[name] for name in MANDATORY_COLUMNS if name != "ChargeClass")
    with pytest.raises(UsageArchiveError, match="permissions and its free space"):
        write_focus_parquet(charges, tmp_path / "missing" / "month.parquet")


def test_caused_cost_sums_to_the_cost_of_the_hardware(store: Store) -> None:
    """Busy time is divided by weighted tokens, and idle time is a row of its own."""
    lease = store.fleets.acquire_lease("controller", store.fleets.read_lease("f"))
    assert lease is not None
    day = int(MIDNIGHT // DAY)
    for pool, fields in (
        ("a", {"model": "m", "replica_ms": 900, "busy_ms": 300, "nano_dollars": 1001}),
        ("a", {"model": "m", "replica_ms": 100, "busy_ms": 100, "nano_dollars": 99}),
        ("b", {"model": "m", "replica_ms": 1000, "busy_ms": 400, "nano_dollars": 900}),
        ("c", {"model": "unused", "replica_ms": 5, "busy_ms": 0, "nano_dollars": 7}),
    ):
        store.hardware_costs.add(lease, [HardwareDay(day=day, pool=pool, **fields)])  # type: ignore[arg-type]
    tokens = {"input_tokens": 10, "cached_tokens": 4, "output_tokens": 0}
    store.ledger.add_records(
        [
            usage_row("r1", **tokens, ended_at=MIDNIGHT),
            usage_row("r2", **tokens, ended_at=MIDNIGHT + DAY - 1, project="proj_b"),
            usage_row("r3", **tokens, ended_at=MIDNIGHT + 9, project="proj_b"),
            usage_row("r4", ended_at=MIDNIGHT + DAY, project="proj_b", nano_dollars=5),
        ]
    )
    assert compare_costs(store.ledger, store.hardware_costs, MIDNIGHT, MIDNIGHT + 2 * DAY) == [
        CostRow("m", "org_a", "proj_a", billed=700, caused=267),
        CostRow("m", "org_a", "proj_b", billed=1405, caused=533),
        CostRow("m", is_idle=True, caused=1200),
        CostRow("unused", is_idle=True, caused=7),
    ]


def test_budgets_say_when_they_are_used_up(
    store: Store, project: Project, clock: FakeClock
) -> None:
    """At noon of the 21st of November, 68 % of the month has passed."""
    limits = store.limits_and_prices
    drawn: list[tuple[int, LimitWindow, str | None]] = [
        (10_000, "month", None),
        (10_000, "month", "other"),
        (700, "day", None),
    ]
    for amount, window, model in drawn:
        limits.set_limit(
            "project", project.id, "nano_dollars", amount, window=window, model=model, actor=ACTOR
        )
    rows = [usage_row(f"r{n}", project=project.id, ended_at=MIDNIGHT + 60) for n in range(12)]
    store.ledger.add_records(
        [*rows, usage_row("old", project=project.id, ended_at=MIDNIGHT - 40 * DAY)]
    )
    now = MIDNIGHT + DAY / 2
    budgets = list_budgets(store.ledger, limits.list_limits(), now)
    by_limit = [
        (each.limit.window, each.limit.model, each.forecast.used, each.forecast.step_percent)
        for each in budgets
    ]
    assert by_limit == [
        ("day", None, 8400, 100),
        ("month", None, 8400, 80),
        ("month", "other", 0, 0),
    ]
    day, month, other = (each.forecast for each in budgets)
    assert (day.exhausted_at, day.expected) == (now, 16_800)
    assert month.exhausted_at == pytest.approx(MIDNIGHT - 20 * DAY + 20.5 * DAY / 0.84)
    assert other.exhausted_at is None


def test_outliers_of_cost_have_a_reason(store: Store) -> None:
    price = Price(model="m", input=1000, cached_input=100, output=2000)
    store.limits_and_prices.set_price(price, actor=ACTOR)
    usual = {"input_tokens": 100, "cached_tokens": 80, "output_tokens": 50, "nano_dollars": 128_000}
    rows = [usage_row(f"r{n}", **usual, ended_at=START - n) for n in range(400)]
    expensive = {
        "long": {"input_tokens": 100_000, "cached_tokens": 90_000, "nano_dollars": 19_100_000},
        "cold": {"input_tokens": 20_000, "cached_tokens": 0, "nano_dollars": 20_000_000},
        "verbose": {"output_tokens": 9000, "nano_dollars": 18_028_000},
        "small": {"output_tokens": 4000, "nano_dollars": 8_028_000},  # less than a cent
    }
    rows += [usage_row(name, **usual | each, ended_at=START) for name, each in expensive.items()]
    lone = {"nano_dollars": 10**9, "ended_at": START}
    rows += [
        usage_row("few", project="proj_b", **lone),
        usage_row("old", **lone | {"ended_at": START - 8 * DAY}),
    ]
    store.ledger.add_records(rows)
    outliers = list_outliers(store.ledger, store.accounts, store.limits_and_prices, START + 1)
    assert [(each.record.request, each.reason) for each in outliers] == [
        ("cold", "no cache: 0% of the prompt was cached, 76% on average"),
        ("long", "long prompt: 100,000 tokens, 396 on average"),
        ("verbose", "long output: 9,000 tokens, 81 on average"),
    ]
    assert {each.p99_nano_dollars for each in outliers} == {128_000}
    assert store.ledger.for_organisation("other").find_cost_outliers(START + 1) == []
