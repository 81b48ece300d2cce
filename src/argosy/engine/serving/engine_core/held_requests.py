"""Requests that wait for their grammar. They hold no row and no KV block, and only their timeouts and aborts apply."""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future

    from argosy.engine.engine_request import EngineRequest
    from argosy.engine.grammar import CompiledGrammar


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """Request whose grammar is being compiled."""

    request: EngineRequest
    grammar: Future[CompiledGrammar]
    arrived_at: float
    deadline: float


class HeldRequests:
    """Held requests in the order of their arrival, so that a parent leaves before its siblings."""

    def __init__(self) -> None:
        self._by_id: dict[str, HeldRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, held: HeldRequest) -> None:
        """Hold a request until its grammar is ready."""
        self._by_id[held.request.id] = held

    def cancel(self, request_id: str) -> bool:
        """Drop a request. Return False if it is not held."""
        return self._by_id.pop(request_id, None) is not None

    def pop_expired(self, now: float) -> list[str]:
        """Remove the requests whose deadline has passed, and return their ids."""
        expired = [held.request.id for held in self._by_id.values() if held.deadline <= now]
        for request_id in expired:
            del self._by_id[request_id]
        return expired

    def pop_ready(self) -> list[HeldRequest]:
        """Remove and return the requests whose grammar was compiled or refused."""
        ready = [held for held in self._by_id.values() if held.grammar.done()]
        for held in ready:
            del self._by_id[held.request.id]
        return ready

    def wait(self, timeout_s: float) -> None:
        """Wait until a request is ready, but at most `timeout_s`."""
        grammars = [held.grammar for held in self._by_id.values()]
        concurrent.futures.wait(grammars, timeout_s, concurrent.futures.FIRST_COMPLETED)
