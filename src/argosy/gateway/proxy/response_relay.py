"""One answer under way: fed by one replica after another until it is whole, the client noticing a pause at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from argosy.gateway.backends import (
    Carrier,
    Dialect,
    Identity,
    StreamReader,
    Usage,
    endings_of,
    resumed_tokens,
    tokens_within,
    usage_of,
)
from argosy.gateway.pool import Replica
from argosy.gateway.proxy.attempts import RefusedError
from argosy.gateway.proxy.fast_path import News
from argosy.gateway.proxy.fast_path_switch import Shortcut
from argosy.gateway.proxy.final_events import closing
from argosy.gateway.proxy.response_writers import Out
from argosy.gateway.proxy.token_rate_meter import Pace
from argosy.gateway.request_context import Journey, Visit
from argosy.gateway.upstream import Attempt, UpstreamError
from argosy.policy import Outcome, classify, service


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How long a stream may be silent, in seconds."""

    first_token_s: float
    """The replica, before its first token: then it counts as stalled."""
    between_tokens_s: float
    """The same, after it."""
    keep_alive_s: float
    """Towards the client: then it gets a comment."""
    slow_reader_s: float
    """The client, while much waits for it to be taken: then it is cut off."""


class ClientStream:
    """Watches the client and passes on what its replica gives, piece by piece, without a task between.

    The `visits` of the stages are told of each piece that brought tokens, once it was passed on; a finish reason that
    one gives ends the answer there. `charge` is called each second, `leave` when nobody is to work for it any more.
    """

    def __init__(
        self,
        journey: Journey,
        out: Out,
        carrier: Carrier,
        *,
        visits: Sequence[Visit],
        charge: Callable[[float], None],
        leave: Callable[[], object],
        shortcut: Shortcut | None,
    ) -> None:
        self.gone = False
        self.cut_off = False
        """The client has gone because it took nothing, and was cut off."""
        self.stopped: str | None = None
        """The finish reason with which a limit ended it, or its deadline."""
        self.left = False
        """It has called `leave`."""
        self._journey = journey
        self._delivered = journey.delivered
        self._out = out
        self._carrier = carrier
        self._visits = visits
        self._charge = charge
        self._leave = leave
        self._shortcut = shortcut
        self._told = 0
        self._before = 0
        """Output tokens that the client had when the attempt began."""
        self._first_at: float | None = None
        """When the attempt's first token came."""
        self._pace: Pace | None = None
        self._charged = 0.0
        self._full = False
        self._full_since: float | None = None
        self._attempt: Attempt | None = None
        self._replica: Replica | None = None
        self._reader: StreamReader | None = None
        self._moved_at = 0.0
        """When the answer last got on. A comment says that a server lives, not that it gets on."""
        self._shown_at = 0.0
        """When the client was last given a comment."""

    def feed_from(self, attempt: Attempt, replica: Replica, reader: StreamReader) -> None:
        """Pass on what `reader` makes of what `attempt` gives; `out` must have begun."""
        self._attempt = attempt
        self._replica = replica
        self._before = self._told
        self._first_at = self._pace = None
        self._moved_at = attempt.last
        self._reader = reader
        if self._full:
            attempt.pause()
        attempt.deliver(self._take)

    def finish(self) -> None:
        """Pass on the end of the attempt that has ended. Raises UpstreamError when that was no answer's end.

        RefusedError when the server has only now said that it does not take the request.
        """
        self._measure()
        self._attempt = None
        self.settle()
        if self.stopped is not None:
            return  # its end was there already
        reader = self._reader
        assert reader is not None  # noqa: S101 - the attempt has fed it
        missing = b"" if reader.done else self._missing(reader)
        self._count_prompt()
        try:
            self._push(missing or reader.take_held())
        except ValueError as error:
            raise UpstreamError(f"the end of its stream cannot be read ({error})") from error
        self._journey.pool.answered(self._told / self._journey.ask.choices)

    def _missing(self, reader: StreamReader) -> bytes:
        """What is still to be told of an answer whose stream ended without `[DONE]`. Raises as `finish` does."""
        whole = self._carrier.is_finished and not reader.failure
        ending = self.ending() if whole else None
        if ending is not None:
            return ending
        if self._told == self._before and classify(reader.status or 500) is not Outcome.FAILURE:
            raise RefusedError(reader.status, reader.failure)
        raise UpstreamError(reader.failure or "the stream ended before its end")

    def ending(self) -> bytes | None:
        """What is still to be told of an answer that was told to its last token; None: it was not."""
        ending = self._carrier.ending()
        if ending is None and self._carrier.is_finished and not resumed_tokens(self._journey.ask):
            return self._closing()
        return ending

    def _closing(self, reason: str = "") -> bytes:
        """The events with which the answer ends here; those of its choices that have not end for `reason`."""
        journey, replica = self._journey, self._replica
        assert replica is not None  # noqa: S101 - it gave what there is
        ours = Identity(journey.id, int(journey.started_at), replica.model)
        return closing(journey, self._carrier.identity or ours, reason)

    def end_with(self, events: bytes) -> None:
        """Pass on the end of an answer that its replica could no longer tell."""
        self._push(events)

    def let_go(self) -> None:
        """The attempt failed: what was not told for good is forgotten."""
        self._measure()
        self.settle()
        self._attempt = self._reader = None

    def count_whole(self, content: bytes, came: float, dialect: Dialect) -> None:
        """An answer came in one piece: count what it says it used, about so much where it does not say.

        Tokens that a replica of ours was given to go on after were read as its prompt was.
        """
        journey, delivered = self._journey, self._delivered
        if journey.current is not None:
            journey.current.first = came
        usage = usage_of(content, journey.ask, dialect) or Usage()
        resumed = resumed_tokens(journey.ask) if dialect.journal else 0
        delivered.prompt_tokens = journey.ask.prompt_tokens
        usage.into(delivered)
        delivered.prompt_tokens += resumed
        if usage.completion_tokens is None:
            delivered.output_tokens = tokens_within(content)
        else:
            journey.pool.answered(usage.completion_tokens / journey.ask.choices)
            delivered.output_tokens = max(0, usage.completion_tokens - resumed)
        delivered.finished.update(endings_of(content))
        self.settle()
        self._count((came,))

    def start_over(self) -> None:
        """Forget what was delivered of an answer that is sent whole: the client has none of it."""
        self._out.retract()
        self._delivered.forget()
        self._told = 0

    def slow_down(self) -> bytes:
        """Take the stream back from the fast path, if it is there; what came from the replica and was not read."""
        news = None if self._shortcut is None else self._shortcut.leave()
        self._catch_up(news, self._visits)
        return b"" if news is None else news.rest

    def expire(self) -> None:
        """The request's deadline has passed: its answer ends with what there is."""
        self.slow_down()
        if self._replica is not None:
            self._stop("timeout")
        else:
            self._give_up()

    def settle(self) -> None:
        """Charge the tenant's share for what came since the last time."""
        told = self._delivered
        got = service(told.prompt_tokens - told.cached_tokens, told.output_tokens)
        if got != self._charged:
            came, self._charged = got - self._charged, got
            self._charge(came)

    def tend(self, now: float, limits: StreamLimits) -> None:
        """Called each second: end what has stalled, and show the client that somebody is there."""
        if self._full:
            self._moved_at = now  # it may not
            self._full_since = self._full_since or now
            if now - self._full_since > limits.slow_reader_s:
                self.cut_off = True
                self._journey.exchange.cut()
        attempt = self._attempt
        if attempt is None:
            if self._replica is not None:  # another is waited for
                self._show_now_and_then(now, limits)
            return
        if self._shortcut is not None:
            self._catch_up(self._shortcut.news(), self._shortcut.beside)
        self.settle()
        if self._pace is not None:
            self._pace.measure(self._told, now)
            self._pace.held = self._full
        patience = limits.first_token_s if self._first_at is None else limits.between_tokens_s
        if now - self._moved_at > patience:
            self.slow_down()
            attempt.abandon(f"nothing came for {patience:g} s")
        else:
            self._show_now_and_then(now, limits)

    def _take(self, body: bytes) -> None:
        reader, attempt = self._reader, self._attempt
        if reader is None or attempt is None or self.stopped is not None:
            return
        data = reader.feed(body)
        if data and not self.gone:
            if data.startswith(b":"):
                self._shown_at = attempt.last
            else:
                self._moved_at = attempt.last
            self._out.push(data)
        told = self._delivered.output_tokens
        if told != self._told:
            self._moved_at = attempt.last  # also where their text is held back
            if self._first_at is None:
                self._count_prompt()
                self._begin()
            self._told = told
            reason = self._count((attempt.last,)) or ("length" if self._out.full else None)
            if reason is not None:
                self._stop(reason)
                return
            if self._shortcut is not None and self._shortcut.passed_by():
                # What was pushed is with the kernel by then.
                asyncio.get_running_loop().call_soon(self._hurry)
        if reader.over or reader.status:  # what that status means is for `finish` to say
            attempt.leave()
        elif reader.failure:
            attempt.abandon(reader.failure)

    def _count_prompt(self) -> None:
        """There is an answer, so its prompt counts: about so many tokens, as long as no server says."""
        told = self._delivered
        told.prompt_tokens = told.prompt_tokens or self._journey.ask.prompt_tokens

    def _count(self, times: Sequence[float]) -> str | None:
        """Tell all stages that more was delivered; the finish reason of one that ends the answer here."""
        ends = None
        for visit in self._visits:
            ends = visit.counted(times) or ends
        return ends

    def _hurry(self) -> None:
        """Let the stream go on by itself, if it can at this moment."""
        attempt, reader = self._attempt, self._reader
        if self._shortcut is None or attempt is None or reader is None:
            return
        if reader.steady and not (self._full or self.gone or self.stopped):
            self._shortcut.take(attempt, self._told, self._read_on)

    def _read_on(self) -> None:
        """Take the stream back from there, and go on."""
        rest = self.slow_down()
        if self._attempt is not None:
            self._attempt.take_back(rest)
            if self._full and self._attempt is not None:
                self._attempt.pause()

    def _show_now_and_then(self, now: float, limits: StreamLimits) -> None:
        if now - max(self._moved_at, self._shown_at) > limits.keep_alive_s:
            self._shown_at = now
            self._show_life()

    def _show_life(self) -> None:
        self._read_on()
        self._out.keep_alive()

    def _catch_up(self, news: News | None, visits: Sequence[Visit]) -> None:
        attempt = self._attempt
        if attempt is None or news is None or not news.times:
            return
        self._delivered.tokens.setdefault(0, []).append(news.ids)
        self._delivered.output_tokens = self._told = news.output
        attempt.last = self._moved_at = news.times[-1]
        for visit in visits:
            visit.counted(news.times)

    def _begin(self) -> None:
        """The attempt's first token came: what does that say of its replica?"""
        attempt, replica, told = self._attempt, self._replica, self._delivered
        tried, picked = self._journey.current, self._journey.picked
        if attempt is None or replica is None or tried is None or picked is None:
            return
        self._first_at = tried.first = attempt.last
        if self._journey.ask.choices == 1:
            self._pace = Pace(replica, told.output_tokens, attempt.last)
            self._pace.held = self._full
        replica.computed(picked.uncached, tried.at)
        if tried.sent is None or self._before:
            return
        uncached = picked.uncached
        if replica.kind == "argosy":  # others tell at the end, if at all
            uncached = told.prompt_tokens - told.cached_tokens
            prompt = told.prompt_tokens - resumed_tokens(self._journey.ask)
            picked.answered(prompt, told.cached_tokens, told.prompt_blocks)
        elif told.prompt_ids is not None:
            picked.read(told.prompt_ids, self._journey.ask)
        replica.first_token(attempt.last - tried.sent, uncached, attempt.last)

    def _measure(self) -> None:
        """The attempt is over."""
        if self._attempt is not None and self._pace is not None:
            self._pace.measure(self._told, self._attempt.last)

    def _stop(self, reason: str) -> None:
        """End the answer here, unless its replica just has."""
        journey = self._journey
        if self.stopped is not None or len(self._delivered.finished) == journey.ask.choices:
            return
        self.stopped = reason
        self._push(self._carrier.held_back() + self._closing(reason))
        for choice in range(journey.ask.choices):
            self._delivered.finished.setdefault(choice, reason)
        if self._attempt is not None:
            self._attempt.abandon("the answer was ended here")
        else:  # the next replica is waited for
            self._give_up()

    def _give_up(self) -> None:
        self.left = True
        self._leave()

    def _push(self, data: bytes) -> None:
        if data and not self.gone:
            self._out.push(data)

    # --- what the client's connection calls --------------------------------------------------------

    def on_full(self) -> None:
        """The client is behind: the replica waits."""
        self._full = True
        if self._pace is not None:
            self._pace.held = True
        if self._attempt is not None:
            self._attempt.pause()

    def on_room(self) -> None:
        """It has caught up."""
        self._full = False
        self._full_since = None
        if self._attempt is not None:
            self._attempt.resume()

    def on_quiet(self) -> None:
        """It will send no more: what it is sent tells whether it is there."""
        if not self._full:
            self._show_life()

    def on_gone(self) -> None:
        """Nobody waits any more: the replica learns of it at once."""
        self.gone = True
        self.slow_down()
        self._give_up()
