"""Terms: what accounts may use, and what it costs. Limits and prices, and every way to change them."""

from __future__ import annotations

import msgspec

from argosy.store.api_keys import generate_id
from argosy.store.record_tables import ALL_RECORDS, PageRequest, RecordTables
from argosy.store.records import (
    Key,
    Limit,
    LimitUnit,
    LimitWindow,
    Organisation,
    OwnerKind,
    Price,
    Project,
    User,
)
from argosy.store.validation import validate_record

_OWNER_TYPES: dict[OwnerKind, type[Organisation | Project | User | Key]] = {
    "organisation": Organisation,
    "project": Project,
    "user": User,
    "key": Key,
}


class LimitsAndPrices(RecordTables):
    """Reads and changes limits and prices. `actor` says who makes a change.

    Limits are listed by their ids, and prices by when they begin; in parts as those of `Accounts` are.
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
        """A limit of the owner with this id, in place of the one it has for the same unit, window and model."""
        if (window is None) != (unit == "concurrency"):
            raise ValueError("A limit has a window, such as minute; only concurrency has none.")
        if owner_kind not in _OWNER_TYPES:
            raise ValueError(f"The owner of a limit is one of {', '.join(_OWNER_TYPES)}.")
        with self._begin_transaction(actor) as change:
            change.get_active_record(_OWNER_TYPES[owner_kind], owner)
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
            same = change.find_records(
                Limit,
                owner_kind=owner_kind,
                owner=owner,
                unit=unit,
                window=window,
                model=limit.model,
            )
            if same:
                return change.update_record(same[0], "change", amount=amount)
            return change.create_record(limit)

    def get_limit(self, limit: str) -> Limit:
        """The one with this id."""
        return self._get_record(Limit, limit)

    def list_limits(
        self,
        owner_kind: OwnerKind | None = None,
        owner: str | None = None,
        page: PageRequest = ALL_RECORDS,
    ) -> list[Limit]:
        """Those of one owner, of one kind of owners, or all."""
        return self._find_records(Limit, page, owner_kind=owner_kind, owner=owner)

    def delete_limit(self, limit: str, *, actor: str) -> None:
        """Lift the limit with this id."""
        with self._begin_transaction(actor) as change:
            change.delete_record(change.get_record(Limit, limit))

    def set_price(self, price: Price, *, actor: str) -> Price:
        """A price, in place of the one for the same model, tier and moment, if there is one."""
        price = validate_record(msgspec.structs.replace(price, id=generate_id("price")))
        with self._begin_transaction(actor) as change:
            same = change.find_records(Price, model=price.model, tier=price.tier, since=price.since)
            if same:
                return change.update_record(
                    same[0],
                    "change",
                    input=price.input,
                    cached_input=price.cached_input,
                    output=price.output,
                )
            return change.create_record(price)

    def list_prices(self, model: str | None = None, page: PageRequest = ALL_RECORDS) -> list[Price]:
        """Those of one model, or all, past and coming ones too."""
        return self._find_records(Price, page, model=model)
