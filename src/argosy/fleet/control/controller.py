"""The controller of a fleet: leads it, or stands by until the leader is gone."""

from __future__ import annotations

import asyncio

import structlog

from argosy.fleet.control.leader_term import LeaderTerm
from argosy.fleet.control.leadership import Leadership
from argosy.fleet.control.term_journal import FleetContext
from argosy.fleet.launchers import StaleEpochError
from argosy.store import StoreError

DEFAULT_LEASE_S = 5.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.fleet")


class Controller:
    """Controller of one fleet. Not thread-safe: use it from one event loop.

    Args:
        holder: Name of this controller, unique among those that run.
        lease_s: How long a leader may be silent before a standby takes over.
    """

    def __init__(
        self, context: FleetContext, holder: str, lease_s: float = DEFAULT_LEASE_S
    ) -> None:
        self._context = context
        self._leadership = Leadership(context.store.fleets, context.fleet, holder, lease_s)

    async def run(self, *, until_empty: bool = False) -> None:
        """Lead or stand by until cancelled.

        Args:
            until_empty: Return once this controller leads, the declaration has no pools, and nothing runs.
        """
        try:
            while not await self._run_term(until_empty=until_empty):
                pass
        finally:
            await self._leadership.release()

    async def _run_term(self, *, until_empty: bool) -> bool:
        """Lead once. Returns whether the fleet is empty; otherwise another controller leads."""
        lease = await self._leadership.acquire()
        term = LeaderTerm(self._context, self._leadership)
        keep_lease = asyncio.create_task(self._leadership.keep(), name="keep-lease")
        lead = asyncio.create_task(term.run(lease, until_empty=until_empty), name="lead")
        try:
            await asyncio.wait({keep_lease, lead}, return_when=asyncio.FIRST_COMPLETED)
            await (lead if lead.done() else keep_lease)
        except (StaleEpochError, StoreError) as error:
            log.warning("leadership_lost", fleet=self._context.fleet, reason=str(error))
            if isinstance(error, StaleEpochError):  # perhaps of a store that was restored
                await self._leadership.release(error.newer_epoch)
            return False
        finally:
            for task in (keep_lease, lead):
                task.cancel()
            await asyncio.gather(keep_lease, lead, return_exceptions=True)
            await term.close()
        return True
