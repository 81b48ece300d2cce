"""Requests that wait for a grammar or an adapter. They hold no row and no KV block. Only timeouts and aborts apply."""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future

    from argosy.engine.engine_request import EngineRequest
    from argosy.engine.grammar import CompiledGrammar


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """Request with the results for which it waits."""

    request: EngineRequest
    arrived_at: float
    deadline: float
    grammar: Future[CompiledGrammar] | None = None
    adapter_slot: Future[int] | None = None

    @property
    def pending(self) -> list[Future[Any]]:
        """Results that are not available yet."""
        futures: tuple[Future[Any] | None, ...] = self.grammar, self.adapter_slot
        return [future for future in futures if future is not None and not future.done()]


class HeldRequests:
    """Held requests in the order of their arrival, so that a parent leaves before its siblings."""

    def __init__(self) -> None:
        self._by_id: dict[str, HeldRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, held: HeldRequest) -> None:
        """Hold a request until all of its results are available."""
        self._by_id[held.request.id] = held

    def cancel(self, request_id: str) -> bool:
        """Drop a request. Return False if it is not held."""
        return self._by_id.pop(request_id, None) is not None

    def pop_expired(self, now: float) -> list[str]:
        """Remove the requests whose deadline has passed, and return their ids."""
        expired = [request_id for request_id, held in self._by_id.items() if held.deadline <= now]
        for request_id in expired:
            del self._by_id[request_id]
        return expired

    def pop_ready(self) -> list[HeldRequest]:
        """Remove and return the requests whose results are available, or have failed."""
        ready = [held for held in self._by_id.values() if not held.pending]
        for held in ready:
            del self._by_id[held.request.id]
        return ready

    def wait(self, timeout_s: float) -> None:
        """Wait until a result is available, but at most `timeout_s`."""
        pending = [future for held in self._by_id.values() for future in held.pending]
        concurrent.futures.wait(pending, timeout_s, concurrent.futures.FIRST_COMPLETED)
