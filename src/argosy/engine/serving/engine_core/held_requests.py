"""Requests that wait for their grammar. They hold no row and no KV block, and only their timeouts and aborts apply."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future

    from argosy.engine.engine_request import EngineRequest
    from argosy.engine.grammar import CompiledGrammar


class HeldRequests:
    """Held requests in the order of their arrival, so that a parent leaves before its siblings."""

    def __init__(self) -> None:
        self._by_id: dict[str, tuple[EngineRequest, Future[CompiledGrammar], float, float]] = {}
        """Request, grammar, time of arrival and deadline by request id."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(
        self,
        request: EngineRequest,
        grammar: Future[CompiledGrammar],
        arrived_at: float,
        deadline: float,
    ) -> None:
        """Hold a request until its grammar is ready."""
        self._by_id[request.id] = request, grammar, arrived_at, deadline

    def cancel(self, request_id: str) -> bool:
        """Drop a request. Return False if it is not held."""
        return self._by_id.pop(request_id, None) is not None

    def pop_expired(self, now: float) -> list[str]:
        """Remove the requests whose deadline has passed, and return their ids."""
        expired = [
            request_id for request_id, (*_, deadline) in self._by_id.items() if deadline <= now
        ]
        for request_id in expired:
            del self._by_id[request_id]
        return expired

    def pop_ready(self) -> list[tuple[EngineRequest, Future[CompiledGrammar], float]]:
        """Remove the requests whose grammar was compiled or refused. Return each with its grammar and its arrival."""
        ready = [
            (request, grammar, arrived_at)
            for request, grammar, arrived_at, _ in self._by_id.values()
            if grammar.done()
        ]
        for request, _, _ in ready:
            del self._by_id[request.id]
        return ready

    def wait(self, timeout_s: float) -> None:
        """Wait until a request is ready, but at most `timeout_s`."""
        grammars = [grammar for _, grammar, _, _ in self._by_id.values()]
        concurrent.futures.wait(grammars, timeout_s, concurrent.futures.FIRST_COMPLETED)
