"""Usage in the format of FOCUS, the FinOps Open Cost and Usage Specification.

A row is the charge for one kind of token of one day. The costs of all rows sum to the ledger, to the nano-dollar. With
the cost of hardware, each row has its part of it too, and idle time has rows of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Literal, NamedTuple, get_args

import msgspec

from argosy.policy import HardwareUse, Rates, allocate, weighted_tokens
from argosy.store.accounts import Accounts
from argosy.store.csv_export import format_csv
from argosy.store.hardware_costs import (
    CostOwner,
    DayDivision,
    HardwareCosts,
    cost_owner,
    count_service,
    divide_day,
    sum_hardware_days,
)
from argosy.store.ledger import ALL_USAGE, DAY_S, Ledger, ReportGroup, UsageFilter, UsageReportRow
from argosy.store.limits_and_prices import LimitsAndPrices, PriceList

FocusVersion = Literal["1.2", "1.3"]
FOCUS_VERSIONS: tuple[FocusVersion, ...] = get_args(FocusVersion)
PROVIDER = "Argosy"
OPERATOR = "operator"
"""Billing account of idle time."""
_LATEST = 253_402_300_799.0
"""End of the year 9999."""
_GROUPS: tuple[ReportGroup, ...] = ("organisation", "project", "key", "user", "model", "route")
_COLUMNS = (
    "BilledCost",
    "BillingAccountId",
    "BillingAccountName",
    "BillingAccountType",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargeFrequency",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "ConsumedQuantity",
    "ConsumedUnit",
    "ContractedCost",
    "EffectiveCost",
    "InvoiceIssuerName",
    "ListCost",
    "PricingCategory",
    "PricingQuantity",
    "PricingUnit",
    "ProviderName",
    "PublisherName",
    "ServiceCategory",
    "ServiceName",
    "ServiceSubcategory",
    "SkuId",
    "SkuMeter",
    "SkuPriceDetails",
    "SkuPriceId",
    "SubAccountId",
    "SubAccountName",
    "SubAccountType",
    "Tags",
)
HARDWARE_COLUMN = "x_AllocatedCost"
"""Own column with the part of a row in the cost of the hardware."""
FocusRow = dict[str, str | int | None]
_ADDED_COLUMNS: dict[FocusVersion, tuple[str, ...]] = {
    "1.2": (),
    "1.3": ("HostProviderName", "ServiceProviderName"),
}
_COST_COLUMNS = ("BilledCost", "ContractedCost", "EffectiveCost", "ListCost")
_CONSTANTS: FocusRow = {
    "BillingAccountType": "Organisation",
    "BillingCurrency": "USD",
    "ChargeCategory": "Usage",
    "ChargeFrequency": "Usage-Based",
    "ConsumedUnit": "Tokens",
    "InvoiceIssuerName": PROVIDER,
    "PricingCategory": "Standard",
    "PricingUnit": "1000000 Tokens",
    "ProviderName": PROVIDER,
    "PublisherName": PROVIDER,
    "HostProviderName": PROVIDER,
    "ServiceProviderName": PROVIDER,
    "ServiceCategory": "AI and Machine Learning",
    "ServiceName": "Argosy Inference",
    "ServiceSubcategory": "Generative AI",
    "SubAccountType": "Project",
}


class _TokenKind(NamedTuple):
    """A kind of token that has a price of its own."""

    name: str
    meter: str
    details: dict[str, str]
    description: str


_KINDS = (
    _TokenKind("input", "Input Tokens", {"TokenDirection": "Input"}, "Input tokens"),
    _TokenKind(
        "cached-input",
        "Input Tokens",
        {"TokenCacheAction": "Read", "TokenDirection": "Input"},
        "Cached input tokens",
    ),
    _TokenKind("output", "Output Tokens", {"TokenDirection": "Output"}, "Output tokens"),
)


class FocusExport:
    """Usage of whole days as charges, up to three for each group of a day. Calls block on the store.

    The groups are those of the ledger by organisation, project, key, user, model and route. Memory is bounded by a page
    of groups, and by the projects of a day with the cost of hardware.

    Args:
        ledger: The ledger. It, the accounts and the prices see the same organisations.
        accounts: Names and tiers.
        prices: Prices, which divide costs among kinds of tokens.
        version: Version of FOCUS.
        where: Usage that is exported.
        hardware: Cost of the hardware, if the ledger is that of the whole gateway. None leaves its column out.
    """

    def __init__(
        self,
        ledger: Ledger,
        accounts: Accounts,
        prices: LimitsAndPrices,
        version: FocusVersion,
        where: UsageFilter = ALL_USAGE,
        *,
        hardware: HardwareCosts | None = None,
    ) -> None:
        self._ledger = ledger
        self._accounts = accounts
        self._prices = prices
        self._where = where
        self._hardware = hardware
        self.columns: tuple[str, ...] = (*_COLUMNS, *_ADDED_COLUMNS[version])
        if hardware is not None:
            self.columns += (HARDWARE_COLUMN,)

    def iter_csv(self) -> Iterator[str]:
        """Yield the charges as pieces of CSV text, of which the first is a header."""
        yield format_csv([self.columns])
        for page in self.iter_pages():
            yield format_csv([cells.get(name) for name in self.columns] for cells in page)

    def iter_pages(self) -> Iterator[list[FocusRow]]:
        """Yield the charges in pages. A column that a charge lacks has no value."""
        price_list = PriceList(self._prices.list_prices())
        hardware = self._read_hardware()
        division = _Division()
        for page in self._ledger.iter_report(_GROUPS, self._where):
            owners = {each for row in page for each in (row.organisation, row.project) if each}
            names = self._accounts.find_names(owners)
            tiers = self._accounts.find_tiers(owners)
            charges: list[FocusRow] = []
            for row in page:
                found = list(_to_charges(row, names, tiers.get(row.project or "", ""), price_list))
                if self._hardware is not None:
                    if row.day != division.day:
                        yield division.list_idle(self._where)
                        division = self._divide(row.day or "", hardware)
                    division.allocate(row, found)
                charges += found
            yield charges
        yield division.list_idle(self._where)
        for day, uses in sorted(hardware.items()):  # without requests
            start = datetime.fromtimestamp(day * DAY_S, UTC)
            yield _Division(f"{start:%Y-%m-%d}", divide_day([], uses), uses).list_idle(self._where)

    def _read_hardware(self) -> dict[int, dict[str, HardwareUse]]:
        if self._hardware is None:
            return {}
        since, until = self._where.since or 0.0, self._where.until or _LATEST
        return sum_hardware_days(self._hardware.list_days(since, until))

    def _divide(self, day: str, hardware: dict[int, dict[str, HardwareUse]]) -> _Division:
        """Divide the cost of a day among all of its usage, also that which is not exported."""
        start = _parse_day(day).timestamp()
        everyone = UsageFilter(since=start, until=start + DAY_S)
        pages = self._ledger.iter_report(("model", "organisation", "project"), everyone)
        uses = hardware.pop(int(start // DAY_S), {})
        return _Division(day, divide_day((row for page in pages for row in page), uses), uses)


class _Division:
    """Division of one day's cost of hardware among the charges of its projects, in the order of their export.

    A charge gets the part of its weighted tokens in those of its project, rounded so that the parts of a project sum to
    what it caused.
    """

    def __init__(
        self,
        day: str = "",
        division: DayDivision | None = None,
        uses: Mapping[str, HardwareUse] | None = None,
    ) -> None:
        self.day = day
        self._division = division or DayDivision({}, {}, {})
        self._uses = uses or {}
        self._done: Counter[CostOwner] = Counter()
        """Weighted tokens of the charges so far."""

    def allocate(self, row: UsageReportRow, charges: list[FocusRow]) -> None:
        """Set the part of each charge of a group."""
        owner = cost_owner(row)
        cost = self._division.caused.get(owner, 0)
        total = max(1, self._division.service.get(owner, 0))
        service = count_service(row)
        begin, end = self._done[owner], self._done[owner] + service
        self._done[owner] = end
        own = cost * end // total - cost * begin // total
        weights = [_service_of(charge) for charge in charges]
        for charge, part in zip(charges, allocate(own, weights or [1]), strict=False):
            charge[HARDWARE_COLUMN] = _format_dollars(part)

    def list_idle(self, where: UsageFilter) -> list[FocusRow]:
        """Return the charges of idle time, which belong to no organisation."""
        fields = msgspec.structs.asdict(where) | {"since": None, "until": None, "model": None}
        if any(value is not None for value in fields.values()):
            return []
        return [
            _to_idle_charge(self.day, model, cost, self._uses.get(model, HardwareUse()))
            for model, cost in sorted(self._division.idle.items())
            if cost and where.model in {None, model}
        ]


def _to_idle_charge(day: str, model: str, cost: int, use: HardwareUse) -> FocusRow:
    idle_ms = max(0, use.replica_ms - use.busy_ms)
    hours = f"{Decimal(idle_ms) / 3_600_000:.9f}"
    return {
        **_CONSTANTS,
        **_describe_period(day),
        **dict.fromkeys(_COST_COLUMNS, _format_dollars(0)),
        HARDWARE_COLUMN: _format_dollars(cost),
        "BillingAccountId": OPERATOR,
        "BillingAccountName": "Operator",
        "ChargeDescription": f"Replicas of {model} without a request",
        "ConsumedQuantity": hours,
        "ConsumedUnit": "Hours",
        "PricingQuantity": hours,
        "PricingUnit": "Hours",
        "SkuId": f"{model}/idle",
        "SkuMeter": "Idle Replica Hours",
        "SkuPriceDetails": _to_json({"ModelId": model}),
        "SkuPriceId": f"{model}/idle",
        "SubAccountType": None,
        "Tags": "{}",
    }


def _service_of(charge: FocusRow) -> int:
    """Return the weighted tokens of a charge: none for cached tokens, and output tokens count twice."""
    kind = str(charge["SkuId"]).rpartition("/")[2]
    tokens = int(charge["ConsumedQuantity"] or 0)
    return int(weighted_tokens(tokens if kind == "input" else 0, tokens if kind == "output" else 0))


def _to_charges(
    row: UsageReportRow, names: Mapping[str, str], tier: str, prices: PriceList
) -> Iterator[FocusRow]:
    """Yield the charges of one group of a day, without kinds of tokens that it has none of."""
    day = _parse_day(row.day or "")
    organisation, project, model = row.organisation or "", row.project or "", row.model or ""
    cached = min(row.cached_tokens, row.input_tokens)
    tokens = (row.input_tokens - cached, cached, row.output_tokens)
    rates = prices.rates_at(model, tier, day.timestamp() + DAY_S - 1)
    costs = _split_cost(row.nano_dollars, tokens, rates)
    common: FocusRow = {
        **_CONSTANTS,
        **_describe_period(row.day or ""),
        "BillingAccountId": organisation,
        "BillingAccountName": names.get(organisation, organisation),
        "SubAccountId": project or None,
        "SubAccountName": names.get(project, project) or None,
        "Tags": _to_json({"key": row.key, "route": row.route, "user": row.user}),
    }
    for kind, count, cost in zip(_KINDS, tokens, costs, strict=True):
        if not count and not cost:
            continue
        yield common | {
            **dict.fromkeys(_COST_COLUMNS, _format_dollars(cost)),
            "ChargeDescription": f"{kind.description} of {model}",
            "ConsumedQuantity": count,
            "PricingQuantity": f"{count // 10**6}.{count % 10**6:06}",
            "SkuId": f"{model}/{kind.name}",
            "SkuMeter": kind.meter,
            "SkuPriceDetails": _to_json({"ModelId": model, **kind.details}),
            "SkuPriceId": f"{model}/{kind.name}/{tier}" if tier else f"{model}/{kind.name}",
        }


def _split_cost(nano_dollars: int, tokens: tuple[int, int, int], rates: Rates) -> list[int]:
    """Divide a cost among uncached, cached and output tokens, by the prices at the end of the day.

    The ledger has one sum for all kinds. Without a price that explains it, the tokens alone divide it.
    """
    prices = (rates.input, rates.cached_input, rates.output)
    weights = [count * price for count, price in zip(tokens, prices, strict=True)]
    return allocate(nano_dollars, weights if any(weights) else tokens)


def _describe_period(day: str) -> FocusRow:
    start = _parse_day(day)
    month = start.replace(day=1)
    return {
        "BillingPeriodStart": _format_time(month),
        "BillingPeriodEnd": _format_time((month + timedelta(days=32)).replace(day=1)),
        "ChargePeriodStart": _format_time(start),
        "ChargePeriodEnd": _format_time(start + timedelta(days=1)),
    }


def _parse_day(day: str) -> datetime:
    return datetime.fromisoformat(f"{day}T00:00:00+00:00")


def _format_dollars(nano_dollars: int) -> str:
    return f"{nano_dollars // 10**9}.{nano_dollars % 10**9:09}"


def _to_json(fields: Mapping[str, str | None]) -> str:
    """Encode the fields that have a value."""
    given = {name: value for name, value in fields.items() if value}
    return msgspec.json.encode(given, order="sorted").decode()


def _format_time(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
