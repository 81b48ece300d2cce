"""One generation request on its way: what was asked, by whom, where it has been, what the client was given."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec
import structlog

from argosy.gateway.backends import CHAT_PATH, COMPLETION_PATH, Delivered, Dialect
from argosy.gateway.pool import Picked, Pool, Replica
from argosy.gateway.principal import Caller
from argosy.gateway.request_fields import Ask
from argosy.gateway.request_trace import Trace, Try
from argosy.http_server import Exchange
from argosy.policy import Rates, due_at
from argosy.protocol import ApiError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

Status = Literal["completed", "cancelled", "failed", "stopped", "refused"]
"""How a request ended: as it should; the client left; it could not be answered; a limit or its deadline ended it; it
was not to be answered, as it is or now."""
REFUSED_BY_REPLICA = "refused_by_replica"
TOO_LARGE = "request_too_large"
WRONG = frozenset({400, 413, 422})
"""Statuses by which a replica says so of a request; others may be of how it is asked by the fleet."""
UNANSWERED = frozenset[Status]({"failed", "refused"})


@dataclass(frozen=True, slots=True)
class Api:
    """What tells one generation API from another."""

    path: bytes
    prompt_field: str
    id_prefix: str
    whole: str
    """What its answers are called, and its streams' chunks."""
    chunk: str


CHAT = Api(CHAT_PATH, "messages", "chatcmpl", "chat.completion", "chat.completion.chunk")
COMPLETION = Api(COMPLETION_PATH, "prompt", "cmpl", "text_completion", "text_completion")


class Journey(msgspec.Struct, eq=False):
    """One request's way over the replicas."""

    exchange: Exchange
    ask: Ask
    api: Api
    pool: Pool
    id: str
    """The answer's, which no client can choose; it names the request in the ledger and in explanations."""
    caller: Caller
    tier: int
    """The rank that it waits in."""
    route: str = ""
    """Name of the one that decided which pool answers; empty: none did."""
    deadline: float = math.inf
    """When its answer ends with what there is, on the monotonic clock."""
    due: float = 0.0
    """When an engine that goes by dates is to begin with it, in seconds since the epoch, once it was sent to one."""
    tried: set[str] = msgspec.field(default_factory=set)
    """Replicas that failed it since it last got on."""
    unfit: set[str] = msgspec.field(default_factory=set)
    """Replicas that cannot go on where the answer was when they were asked."""
    failures: int = 0
    refusals: int = 0
    """Failures that were answers: of a replica that lives."""
    losses: int = 0
    """Replicas that were lost while they had it, but for what it won meanwhile. It may be what they die of."""
    failing_since: float | None = None
    delivered: Delivered = msgspec.field(default_factory=Delivered)
    headers: list[tuple[bytes, bytes]] = msgspec.field(default_factory=list)
    """Headers of the answer, whatever it will be, refusals included."""
    trace: Trace = msgspec.field(default_factory=Trace)
    """What `argosy explain` shows."""
    replica: str = ""
    """The one that it was at last."""
    picked: Picked | None = None
    """Why it went there."""
    current: Try | None = None
    """The attempt there."""
    started_at: float = msgspec.field(default_factory=time.time)
    """When it came, in seconds since the epoch; every replica is told, as the answer's time."""
    status: Status = "failed"
    error: ApiError | None = None
    """Why it was refused or failed."""
    rates: Rates | None = None
    """What it pays for a token: as the first stage found that goes by prices, so that all charge the same."""
    nano_dollars: int = 0
    """What it cost, once the ledger has said so."""
    replays: str = ""
    """The request that got its answer first, where it got one that was kept."""

    @property
    def digest(self) -> bytes:
        """The same for the same prompt of the same tenant: of a long one its length and its end count."""
        prompt = self.ask.prompt
        whose = f"{self.caller.tenant}\0{self.api.prompt_field} {len(prompt)}\0".encode()
        return hashlib.blake2b(whose + prompt[-DIGESTED_BYTES:], digest_size=16).digest()

    def priority(self, dialect: Dialect) -> int:
        """What its body is to say of its urgency to a server of this kind, wherever it goes."""
        self.due = self.due or due_at(self.tier, time.time())
        return dialect.urgency * int(self.due)

    def goes_to(self, picked: Picked, now: float) -> Replica:
        """Note that it goes to this replica now."""
        self.answered_by(picked, self.asks(picked, now))
        return picked.replica

    def asks(self, picked: Picked, now: float, *, hedge: bool = False) -> Try:
        """Note that this replica is asked now; `hedge`: while another is."""
        replica, told = picked.replica, self.delivered.output_tokens
        replica.sent(picked.uncached)
        return self.trace.begin_try(replica.name, now, told, picked.costs, hedge=hedge)

    def answered_by(self, picked: Picked, tried: Try) -> None:
        """Note whose answer it gets, as far as is known."""
        self.picked, self.current = picked, tried
        self.replica = picked.replica.name

    @property
    def was_wrong(self) -> bool:
        """Whether replicas that looked at it found fault with it, or were asked for too much."""
        error = self.error
        found = {REFUSED_BY_REPLICA, TOO_LARGE}
        return error is not None and error.code in found and error.status in WRONG

    @property
    def ending(self) -> Status:
        """How an answer that is there ended, as its replica says: that may have a deadline for it, too."""
        return "stopped" if "timeout" in self.delivered.finished.values() else "completed"

    def fails(self, error: ApiError) -> None:
        """Note that this is its answer."""
        self.error = error
        if error.status < 500 and self.status == "failed":
            self.status = "refused"

    def got_on(self, tokens: int) -> None:
        """So many tokens of the answer came, at least one."""
        self.tried.clear()
        self.failures = self.refusals = 0
        self.losses = max(0, self.losses - tokens // WON_PER_LOSS)
        self.failing_since = None


DIGESTED_BYTES = 64 * 1024
WON_PER_LOSS = 4
"""Tokens that make up for one replica that was lost: else a request could cost one for each token."""
ANY = 2**62
"""More tokens than any stream has."""


class Alone(NamedTuple):
    """How far a stream may go on by itself: who lets it go is told of its pieces later, many at a time."""

    most: int = ANY
    """Output tokens that it may have."""
    counter: int | None = None
    """Address of a word that has to count them at once."""


class Visit(Protocol):
    """One request's, at a stage that has let it in."""

    def counted(self, times: Sequence[float]) -> str | None:
        """More was delivered, as the journey's `delivered` tells, in pieces that came at `times` (monotonic clock).

        Called for each piece of a stream that is not on its own, so it must be quick. A finish reason ends the answer
        here, once what came has been passed on.
        """

    def alone(self) -> Alone:
        """How far the stream may go on before this is told of it."""

    def leave(self) -> None:
        """The request has ended, as the journey's `status` tells. Called once, last stage first."""


class Stage(Protocol):
    """Something that every request passes: limits, the ledger, the record for explanations."""

    async def enter(self, journey: Journey) -> Visit | None:
        """Let the request in, answer it, or raise ApiError to refuse it. None: it need not be told how that goes on."""


async def enter(stages: Sequence[Stage], visits: list[Visit], journey: Journey) -> bool:
    """Pass all stages; whether they let it in: one may have answered it.

    `visits` gets those to be told more, also when one refuses. Raises ApiError then.
    """
    for stage in stages:
        visit = await stage.enter(journey)
        if visit is not None:
            visits.append(visit)
        elif journey.exchange.complete:
            return False
    return True


def leave(visits: list[Visit], journey: Journey) -> None:
    """End the visits, last first; one that fails keeps none of the others."""
    while visits:
        try:
            visits.pop().leave()
        except Exception:
            log.exception("stage_not_left", model=journey.pool.model)
