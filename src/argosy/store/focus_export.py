"""Usage in the format of FOCUS, the FinOps Open Cost and Usage Specification, as CSV.

A row is the charge for one kind of token of one day. The costs of all rows sum to the ledger, to the nano-dollar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple, get_args

import msgspec

from argosy.policy import Rates, allocate
from argosy.store.accounts import Accounts
from argosy.store.csv_export import format_csv
from argosy.store.ledger import ALL_USAGE, DAY_S, Ledger, ReportGroup, UsageFilter, UsageReportRow
from argosy.store.limits_and_prices import LimitsAndPrices, PriceList

FocusVersion = Literal["1.2", "1.3"]
FOCUS_VERSIONS: tuple[FocusVersion, ...] = get_args(FocusVersion)
PROVIDER = "Argosy"
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
_ADDED_COLUMNS: dict[FocusVersion, tuple[str, ...]] = {
    "1.2": (),
    "1.3": ("HostProviderName", "ServiceProviderName"),
}
_CONSTANTS = {
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


def export_focus(
    ledger: Ledger,
    accounts: Accounts,
    prices: LimitsAndPrices,
    version: FocusVersion,
    where: UsageFilter = ALL_USAGE,
) -> Iterator[str]:
    """Yield the usage of whole days as pieces of CSV text: a header, then up to three rows for each group of a day.

    The groups are those of the ledger by organisation, project, key, user, model and route. All three arguments see the
    same organisations. Memory is bounded by a page of groups.
    """
    columns = (*_COLUMNS, *_ADDED_COLUMNS[version])
    yield format_csv([columns])
    price_list = PriceList(prices.list_prices())
    for page in ledger.iter_report(_GROUPS, where):
        owners = {each for row in page for each in (row.organisation, row.project) if each}
        names = accounts.find_names(owners)
        tiers = accounts.find_tiers(owners)
        rows = (
            cells
            for row in page
            for cells in _to_charges(row, names, tiers.get(row.project or "", ""), price_list)
        )
        yield format_csv([cells.get(name) for name in columns] for cells in rows)


def _to_charges(
    row: UsageReportRow, names: Mapping[str, str], tier: str, prices: PriceList
) -> Iterator[dict[str, str | int | None]]:
    """Yield the charges of one group of a day, without kinds of tokens that it has none of."""
    day = datetime.fromisoformat(f"{row.day}T00:00:00+00:00")
    month = day.replace(day=1)
    organisation, project, model = row.organisation or "", row.project or "", row.model or ""
    cached = min(row.cached_tokens, row.input_tokens)
    tokens = (row.input_tokens - cached, cached, row.output_tokens)
    rates = prices.rates_at(model, tier, day.timestamp() + DAY_S - 1)
    costs = _split_cost(row.nano_dollars, tokens, rates)
    common: dict[str, str | int | None] = {
        **_CONSTANTS,
        "BillingAccountId": organisation,
        "BillingAccountName": names.get(organisation, organisation),
        "BillingPeriodStart": _format_time(month),
        "BillingPeriodEnd": _format_time((month + timedelta(days=32)).replace(day=1)),
        "ChargePeriodStart": _format_time(day),
        "ChargePeriodEnd": _format_time(day + timedelta(days=1)),
        "SubAccountId": project or None,
        "SubAccountName": names.get(project, project) or None,
        "Tags": _to_json({"key": row.key, "route": row.route, "user": row.user}),
    }
    for kind, count, cost in zip(_KINDS, tokens, costs, strict=True):
        if not count and not cost:
            continue
        dollars = f"{cost // 10**9}.{cost % 10**9:09}"
        yield common | {
            **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), dollars),
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


def _to_json(fields: Mapping[str, str | None]) -> str:
    """Encode the fields that have a value."""
    given = {name: value for name, value in fields.items() if value}
    return msgspec.json.encode(given, order="sorted").decode()


def _format_time(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
