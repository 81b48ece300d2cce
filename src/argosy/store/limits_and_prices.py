"""Limits and prices: the operations that read and change them, and the prices of tokens over time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import msgspec

from argosy.policy import NO_CHARGE, Rates
from argosy.store.api_keys import generate_id
from argosy.store.record_tables import ALL_RECORDS, OWNER_TYPES, PageRequest, RecordTables
from argosy.store.records import Limit, LimitUnit, LimitWindow, OwnerKind, Price
from argosy.store.validation import validate_record

RateHistory = tuple[list[float], list[Rates]]
"""Times of change in ascending order, and the rates before the first change and after each."""
UNITS_WITHOUT_WINDOW: frozenset[LimitUnit] = frozenset({"concurrency", "stored_bytes"})
NO_RATE_HISTORY: RateHistory = ([], [NO_CHARGE])


class LimitsAndPrices(RecordTables):
    """Reads and changes limits and prices. `actor` names who makes a change, for the audit log.

    Lists of limits are ordered by id and lists of prices by start time. They are paged like those of `Accounts`.
    """

    def set_limit(
        self,
        owner_kind: OwnerKind,
        owner: str,
        unit: LimitUnit,
        amount: int,
        *,
        window: LimitWindow | None = None,
        model: str | None = None,
        actor: str,
    ) -> Limit:
        """Set a limit, replacing the owner's limit for the same unit, window and model.

        Raises:
            ValueError: A field is invalid, or the window, owner or model does not fit the unit.
            NotFoundError: The owner does not exist.
            ConflictError: The owner has ended, or its organisation has the maximum number of limits.
        """
        if (window is None) != (unit in UNITS_WITHOUT_WINDOW):
            raise ValueError(
                "A limit needs a window, such as minute. Only a limit on concurrency or stored_bytes has none."
            )
        if unit == "stored_bytes" and (owner_kind != "project" or model is not None):
            raise ValueError("A limit on stored_bytes is that of a project, and for no model.")
        if owner_kind not in OWNER_TYPES:
            raise ValueError(f"The owner of a limit must be one of {', '.join(OWNER_TYPES)}.")
        with self._begin_transaction(actor) as transaction:
            transaction.get_active_record(OWNER_TYPES[owner_kind], owner)
            limit = validate_record(
                Limit(
                    id=generate_id("limit"),
                    owner_kind=owner_kind,
                    owner=owner,
                    unit=unit,
                    amount=amount,
                    window=window,
                    model=model,
                )
            )
            existing = transaction.find_records(
                Limit,
                owner_kind=owner_kind,
                owner=owner,
                unit=unit,
                window=window,
                model=limit.model,
            )
            if existing:
                return transaction.update_record(existing[0], "change", amount=amount)
            return transaction.create_record(limit)

    def get_limit(self, limit: str) -> Limit:
        """Return the limit with this id, or raise NotFoundError."""
        return self._get_record(Limit, limit)

    def list_limits(
        self,
        owner_kind: OwnerKind | None = None,
        owner: str | None = None,
        page: PageRequest = ALL_RECORDS,
    ) -> list[Limit]:
        """List the limits of one owner, of all owners of one kind, or of all owners."""
        return self._find_records(Limit, page, owner_kind=owner_kind, owner=owner)

    def delete_limit(self, limit: str, *, actor: str) -> None:
        """Delete the limit with this id, or raise NotFoundError."""
        with self._begin_transaction(actor) as transaction:
            transaction.delete_record(transaction.get_record(Limit, limit))

    def set_price(self, price: Price, *, actor: str) -> Price:
        """Set a price, replacing the price for the same model, tier and start time. The store sets the id."""
        price = validate_record(msgspec.structs.replace(price, id=generate_id("price")))
        with self._begin_transaction(actor) as transaction:
            existing = transaction.find_records(
                Price, model=price.model, tier=price.tier, since=price.since
            )
            if existing:
                return transaction.update_record(
                    existing[0],
                    "change",
                    input=price.input,
                    cached_input=price.cached_input,
                    output=price.output,
                )
            return transaction.create_record(price)

    def list_prices(self, model: str | None = None, page: PageRequest = ALL_RECORDS) -> list[Price]:
        """List the prices of one model or of all, including past and future ones."""
        return self._find_records(Price, page, model=model)


class PriceList:
    """All past, present and future prices."""

    def __init__(self, prices: Iterable[Price] = ()) -> None:
        self._rates: dict[tuple[str, str | None], RateHistory] = {}
        for price in sorted(prices, key=lambda price: (price.tier is not None, price.since)):
            key = price.model, price.tier
            if key not in self._rates:
                # Before its own first price, a tier pays the price for all tiers.
                times, rates = self._rates.get((price.model, None), NO_RATE_HISTORY)
                count_before = bisect_left(times, price.since)
                self._rates[key] = times[:count_before], rates[: count_before + 1]
            times, rates = self._rates[key]
            times.append(price.since)
            rates.append(Rates(price.input, price.cached_input, price.output))

    def rates_at(self, model: str, tier: str, now: float) -> Rates:
        """Return the newest rates of the tier that are valid at `now`.

        A tier without own prices pays the rates for all tiers. Without any price the tokens are free.
        """
        times, rates = self._rates.get((model, tier)) or self._rates.get(
            (model, None), NO_RATE_HISTORY
        )
        return rates[bisect_right(times, now)]
