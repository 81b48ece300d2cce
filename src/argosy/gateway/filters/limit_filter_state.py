"""What one request holds of its caller's limits: more of them while it streams, what it used at its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from argosy.gateway.filters.limit_responses import Headers, kept_out
from argosy.gateway.request_context import UNANSWERED, Alone, Journey
from argosy.gateway.request_fields import DEFAULT_OUTPUT
from argosy.policy import (
    Meter,
    OutputEstimates,
    Rates,
    Refusal,
    Reservation,
    Use,
    ended,
    running,
)
from argosy.store import Clock, SharedState, Wants

STEP = 32
"""Output tokens that a stream holds ahead once it has passed what was expected."""


@dataclass(frozen=True, slots=True)
class Party:
    """All limits that a caller's requests for a model come under."""

    meters: tuple[Meter, ...]
    trusted: bool
    """It goes on while nobody can say how much is used."""
    asker: tuple[str, ...]
    headers: Headers


class Unsure:
    """What is decided while the shared state cannot say how much is used, and how often it was."""

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self.allowed = 0
        self.refused = 0

    def decide(self, party: Party, wants: Wants, now: float) -> bool:
        """Whether a request, or a stream, goes on: as its project has it, within this gateway's share."""
        on = self.decide_again(party, wants, now)
        self.allowed += on
        return on

    def decide_again(self, party: Party, wants: Wants, now: float) -> bool:
        """The same for a stream that has gone on before: it is counted only when it does so no longer."""
        on = party.trusted and self._state.trust(wants, now)
        self.refused += not on
        return on


class Held(msgspec.Struct, eq=False):
    """A `Visit`."""

    state: SharedState
    unsure: Unsure
    clock: Clock
    estimates: OutputEstimates
    party: Party
    journey: Journey
    reservation: Reservation
    rates: Rates
    prompt: int
    """It is enough for so many tokens of the prompt,"""
    output: int
    """and for so many of the answer."""
    made: int = 0
    """Tokens of the answer so far, whether its client gets them or leaves before it is whole."""
    went_on: bool = False
    """While nobody could say how much is used."""
    refusal: Refusal | None = None
    """The limit that has no more room."""

    def alone(self) -> Alone:
        """As far as what is held is enough."""
        enough = self.journey.delivered.prompt_tokens <= self.prompt
        return Alone(self.output if enough else 0)

    def counted(self, times: Sequence[float]) -> str | None:  # noqa: ARG002 - limits go by the wall clock
        """Hold more when what was delivered passes what is held."""
        told = self.journey.delivered
        self.made = told.output_tokens
        if told.output_tokens <= self.output and told.prompt_tokens <= self.prompt:
            return None
        return self._extend()

    def leave(self) -> None:
        """Give back what was not used; of a request that was sent nowhere, or got nothing because of us, all.

        One that a replica found wrong was a request all the same.
        """
        told, journey, now = self.journey.delivered, self.journey, self.clock()
        if self.refusal is not None and journey.status == "stopped":
            journey.trace.limits += kept_out([self.refusal])
        if not told.output_tokens and (journey.status in UNANSWERED or not journey.replica):
            self.reservation.settle(Use(requests=int(journey.was_wrong)), now)
            return
        prompt, output = told.prompt_tokens, told.output_tokens
        cost = self.rates.cost(prompt, told.cached_tokens, output)
        if not prompt and journey.status in {"cancelled", "stopped"}:
            # It was being read, or soon would have been: to leave early, or allow little time, makes none of it free.
            prompt, output = self.prompt, self.made
        self.reservation.settle(ended(prompt, output, cost), now)
        if journey.status == "completed":
            length = told.output_tokens // journey.ask.choices
            self.estimates.learn(self.party.asker, length, DEFAULT_OUTPUT)

    def _extend(self) -> str | None:
        """Hold more, for a while ahead if there is room; the finish reason where there is none."""
        told, now = self.journey.delivered, self.clock()
        prompt, output = told.prompt_tokens or self.prompt, told.output_tokens
        ahead = self.output if output <= self.output else output + STEP
        for enough in (ahead, output):
            use = running(self.rates, prompt, told.cached_tokens, enough)
            if self.reservation.extend(use, now) is None:
                self.prompt, self.output = prompt, enough
                return None
        wants = wants_of(self.reservation.lacking(use))
        if not self.state.lend(wants, now) and self.state.up is False:
            decide = self.unsure.decide_again if self.went_on else self.unsure.decide
            self.went_on = decide(self.party, wants, now)
        refusal = self.refusal = self.reservation.extend(use, now)
        if refusal is None:
            self.prompt, self.output = prompt, output
            return None
        self.reservation.count(use, now)
        return "budget" if refusal.meter.unit == "nano_dollars" else "limit"


def wants_of(lacking: Iterable[tuple[Meter, int]]) -> Wants:
    """What the shared state is asked for."""
    return [(meter.counter, units) for meter, units in lacking]
