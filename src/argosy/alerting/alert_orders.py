"""Orders of people about alerts: silences, and test notices. The store has them beside the alerts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import msgspec

from argosy.policy.alerting import Matchers, Silence
from argosy.store import AuditedDecision, ConflictError, FleetDocument, FleetStore, NotFoundError

ORDERS_NAME = "alerting/orders"
MAX_SILENCES = 200
MAX_TESTS = 10
MAX_SILENCE_S = 30 * 86_400.0
SILENCE_RETENTION_S = 86_400.0
TEST_RETENTION_S = 600.0
MAX_TRIES = 5


class TestOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Order to send a test notice to a receiver."""

    id: str
    receiver: str
    created_at: float


class AlertOrders(msgspec.Struct, frozen=True, kw_only=True):
    """All orders of a fleet."""

    silences: tuple[Silence, ...] = ()
    tests: tuple[TestOrder, ...] = ()


class OrderBook:
    """Orders of a fleet in the store, or in memory without one. Every call may block on the store.

    Args:
        store: The store; None keeps the orders in memory.
        fleet: Name of the fleet.
        clock: Returns seconds since the epoch.
    """

    def __init__(
        self, store: FleetStore | None, fleet: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._clock = clock
        self._document: FleetDocument | None = None

    def read(self) -> AlertOrders:
        """Return the orders, without old ones."""
        return self._read()[0]

    def add_silence(
        self, matchers: Matchers, duration_s: float, *, actor: str, reason: str
    ) -> Silence:
        """Add a silence. The audit log records who did so.

        Raises:
            ConflictError: There are too many silences.
        """
        now = self._clock()
        silence = Silence(
            id=f"sil_{secrets.token_hex(8)}",
            matchers=matchers,
            author=actor,
            reason=reason,
            created_at=now,
            ends_at=now + duration_s,
        )

        def add(orders: AlertOrders) -> AlertOrders:
            if len(orders.silences) >= MAX_SILENCES:
                raise ConflictError(
                    f"There are {MAX_SILENCES} silences. End one, or use one with `*` for several."
                )
            return msgspec.structs.replace(orders, silences=(*orders.silences, silence))

        details = {"silence": silence.id, "matchers": matchers, "ends_at": silence.ends_at}
        self._change(add, actor, "alert.silence", reason, details)
        return silence

    def end_silence(self, silence_id: str, *, actor: str, reason: str) -> Silence:
        """End a silence now. The audit log records who did so.

        Raises:
            NotFoundError: No such silence is in force.
        """
        now = self._clock()

        def end(orders: AlertOrders) -> AlertOrders:
            silences = list(orders.silences)
            for index, each in enumerate(silences):
                if each.id == silence_id and each.ends_at > now:
                    silences[index] = msgspec.structs.replace(each, ends_at=now)
                    return msgspec.structs.replace(orders, silences=tuple(silences))
            raise NotFoundError(f"No silence {silence_id!r} is in force.")

        orders = self._change(end, actor, "alert.unsilence", reason, {"silence": silence_id})
        return next(each for each in orders.silences if each.id == silence_id)

    def add_test(self, receiver: str, *, actor: str) -> TestOrder:
        """Order a test notice. The audit log records who did so.

        Raises:
            ConflictError: There are too many orders.
        """
        order = TestOrder(
            id=f"tst_{secrets.token_hex(8)}", receiver=receiver, created_at=self._clock()
        )

        def add(orders: AlertOrders) -> AlertOrders:
            if len(orders.tests) >= MAX_TESTS:
                raise ConflictError(
                    f"{MAX_TESTS} test notices were ordered within 10 minutes. Wait for a while."
                )
            return msgspec.structs.replace(orders, tests=(*orders.tests, order))

        self._change(add, actor, "alert.test", "", {"receiver": receiver})
        return order

    def _read(self) -> tuple[AlertOrders, int]:
        document = self._document
        if self._store is not None:
            document = self._store.read_documents(self._fleet, ORDERS_NAME).get(ORDERS_NAME)
        if document is None:
            return AlertOrders(), 0
        orders, now = msgspec.json.decode(document.content, type=AlertOrders), self._clock()
        kept = AlertOrders(
            silences=tuple(
                each for each in orders.silences if now - each.ends_at < SILENCE_RETENTION_S
            ),
            tests=tuple(each for each in orders.tests if now - each.created_at < TEST_RETENTION_S),
        )
        return kept, document.version

    def _change(
        self,
        change: Callable[[AlertOrders], AlertOrders],
        actor: str,
        action: str,
        reason: str,
        details: dict[str, object],
    ) -> AlertOrders:
        decision = AuditedDecision(actor=actor, action=action, reason=reason, details=details)
        for _ in range(MAX_TRIES):
            orders, version = self._read()
            changed = change(orders)
            document = FleetDocument(version + 1, msgspec.json.encode(changed))
            if self._store is None:
                self._document = document
                return changed
            if self._store.replace_document(
                self._fleet, ORDERS_NAME, document, after=version, decision=decision
            ):
                return changed
        raise ConflictError(
            "Another process changed the silences at the same time. Repeat the command."
        )
