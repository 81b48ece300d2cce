"""Writer of a smaller model's answer, which holds it back until log-probabilities or a judge find it good enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import structlog
from msgspec import Raw

from argosy.deployment import CascadeConfig, JudgeConfig
from argosy.gateway.backends import MALFORMED_EVENT_ERRORS
from argosy.gateway.proxy.model_call import ModelCaller
from argosy.gateway.proxy.response_writers import ResponseWriter, WrappingWriter
from argosy.gateway.request_context import CHAT, RequestContext
from argosy.policy.traffic import JUDGE_TOKENS, build_judge_prompt, parse_grade
from argosy.protocol import EVENT_END, ApiError, event_data, format_event

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

MAX_HELD_BYTES = 1 << 20
"""Events that are held back at most. The tokens so far decide then."""
_FIELD = "logprobs"
_DONE = b"[DONE]"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class EscalationError(Exception):
    """An answer that a replica sent in one piece is not good enough. The larger model has to answer."""


class CascadeWriter(WrappingWriter):
    """Response writer that passes the events of a good answer on, and drops those of another one.

    It asks the smaller model for log-probabilities, and removes them again unless the client wants them.
    """

    def __init__(
        self,
        writer: ResponseWriter,
        context: RequestContext,
        config: CascadeConfig,
        can_escalate: Callable[[], bool],
        caller: ModelCaller,
    ) -> None:
        """Create the writer of a request that a route with a cascade selected.

        Args:
            writer: Sends the events.
            context: The request.
            config: When the larger model answers.
            can_escalate: Returns whether it can answer now.
            caller: Sends the answer to the judge.
        """
        super().__init__(writer)
        self._context = context
        self._config = config
        self._can_escalate = can_escalate
        self._caller = caller
        self.abandon: Callable[[], object] | None = None
        """Ends the attempt that runs, so that the larger model can answer. None unless the smaller one answers."""
        self._is_requested = _FIELD in context.fields.raw
        self._held: list[bytes] | None = []
        """Events that are held back; None once they were passed on."""
        self._held_bytes = 0
        self._texts: list[str] = []
        """Text of the answer so far, for the judge."""
        self._is_good = False
        """Whether the answer was judged to be good enough."""
        self._num_tokens = 0
        self._sum = 0.0
        self._min = 0.0
        self.reason = ""
        """Why the larger model has to answer; empty if not."""

    @property
    def is_holding(self) -> bool:  # type: ignore[override]
        return self._held is not None

    def request_logprobs(self) -> None:
        """Ask the smaller model for log-probabilities, if they decide. Call it before its first attempt."""
        if not self._is_requested and self._config.needs_logprobs:
            is_chat = self._context.api is CHAT
            self._context.fields.raw[_FIELD] = Raw(b"true" if is_chat else b"0")

    async def start(self) -> None:
        """Start the response once its model is known, which its headers name."""
        if self._held is None:
            await self._writer.start()

    def write_events(self, events: bytes) -> None:
        if self.reason:
            return
        written = self._read_events(events)
        if self._held is None:
            self._writer.write_events(written)
            return
        self._held.append(written)
        self._held_bytes += len(written)
        limit = self._config.after_tokens
        is_decided = limit is not None and self._num_tokens >= limit
        if self._is_good:
            self._pass_on()
        elif is_decided or self._held_bytes > MAX_HELD_BYTES:
            if self._check_tokens() or self.abandon is None:
                self._pass_on()
            else:
                self.abandon()

    async def filter_body(self, body: bytes) -> bytes:
        if self._held is not None:
            try:
                response = _decode(body)
                for choice in response["choices"]:
                    self._read_choice(choice)
                body = body if self._is_requested else _encode(response)
            except MALFORMED_EVENT_ERRORS as error:
                raise ValueError(f"the response is malformed ({error})") from error
            if not await self.judge():
                raise EscalationError
            self._pass_on()
        return await self._writer.filter_body(body)

    def discard(self) -> bool:
        if self._held is not None:
            self._held.clear()
            self._texts.clear()
            self._held_bytes = self._num_tokens = 0
            self._sum = self._min = 0.0
        return self._writer.discard()

    async def finish(self) -> None:
        if self._held is not None and self._context.fields.stream:
            await self._writer.start()
        self._pass_on()
        await self._writer.finish()

    async def judge(self) -> bool:
        """Judge a whole answer, and record the verdict in the trace. Returns whether it is good enough."""
        config, mean = self._config.judge, self._mean_logprob
        if not self._check_tokens() or config is None or not self._can_escalate():
            return not self.reason
        if config.sure_mean_logprob is not None and mean >= config.sure_mean_logprob:
            return True
        grade, failure = None, "no number in its answer"
        try:
            grade = await self._grade(config)
        except (ApiError, TimeoutError, *MALFORMED_EVENT_ERRORS) as error:
            failure = error.code if isinstance(error, ApiError) else type(error).__name__
        if grade is None:
            log.warning("judge_failed", model=config.model, reason=failure)
            is_good = config.on_failure == "keep"
            found = f"{config.model} gave no grade ({failure})"
        else:
            is_good = grade >= config.min_grade
            found = f"{config.model} grades it {grade:g} of {config.min_grade:g}"
        self.reason = "" if is_good else found
        verdict = {"model": config.model, "grade": grade}
        self._context.record_verdict(
            self._context.trace.routing[-1]["cascade"]
            | {"judge": verdict, "escalated": not is_good, "reason": found}
        )
        return is_good

    async def _grade(self, config: JudgeConfig) -> float | None:
        """Return the judge's grade of the answer; None if it has none. Raises ApiError, TimeoutError, or ValueError."""
        sample = self._context.fields.sample_prompt()
        prompt = build_judge_prompt("" if sample is None else sample.text, "".join(self._texts))
        body = {
            "model": config.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": JUDGE_TOKENS,
            "temperature": 0,
        }
        answer = await self._caller.call(self._context, CHAT, _encode(body), config.timeout_s)
        return parse_grade(_decode(answer)["choices"][0]["message"]["content"])

    @property
    def _mean_logprob(self) -> float:
        return self._sum / self._num_tokens if self._num_tokens else -math.inf

    def _check_tokens(self) -> bool:
        """Check the log-probabilities so far, and record the verdict. Returns whether they are good enough."""
        config, count, mean = self._config, self._num_tokens, self._mean_logprob
        problems = []
        if not count and config.has_least:
            problems.append("the model reports no log-probabilities")
        for name, value, least in (
            ("mean", mean, config.min_mean_logprob),
            ("lowest", self._min, config.min_token_logprob),
        ):
            if count and least is not None and value < least:
                problems.append(f"{name} log-probability {value:.2f} is below {least:g}")
        verdict = "; ".join(problems)
        if verdict and not self._can_escalate():
            verdict, problems = f"{verdict}, but no larger model can answer", []
        self.reason = verdict if problems else ""
        self._context.record_verdict(
            {
                "tokens": count,
                "mean_logprob": round(mean, 4) if count else None,
                "min_logprob": round(self._min, 4) if count else None,
                "escalated": bool(self.reason),
                "reason": verdict or "the answer is good enough",
            }
        )
        return not self.reason

    def release(self) -> None:
        """Pass all further events on, for the larger model, and leave its request as the client sent it."""
        self._held, self.reason = None, ""
        if not self._is_requested:
            self._context.fields.raw.pop(_FIELD, None)
            self._is_requested = True

    def _pass_on(self) -> None:
        """Pass the answer on. A client that still reads an earlier response gets it with later events."""
        self._is_good = True
        exchange = self._context.exchange
        if self._context.fields.stream:
            exchange.try_start_stream()
            if exchange.status is None:
                return
        held, self._held = self._held, None
        if held:
            self._writer.write_events(b"".join(held))

    def _read_events(self, events: bytes) -> bytes:
        """Add the log-probabilities of events. Returns the events as the client is to receive them."""
        if self._held is None and self._is_requested:
            return events
        return b"".join(self._read_event(event) for event in _split(events))

    def _read_event(self, event: bytes) -> bytes:
        data = event_data(event)
        if data is None or data == _DONE:
            return event + EVENT_END
        try:
            chunk = _decode(data)
            for choice in chunk["choices"]:
                self._read_choice(choice)
        except MALFORMED_EVENT_ERRORS as error:
            raise ValueError(f"an event is malformed ({error})") from error
        return event + EVENT_END if self._is_requested else format_event(_encode(chunk))

    def _read_choice(self, choice: dict[str, Any]) -> None:
        """Add the log-probabilities of a choice, and remove them unless the client wants them."""
        if self._held is not None and self._config.judge is not None:
            holder = choice.get("delta") or choice.get("message") or choice
            self._texts.append(holder.get("content") or holder.get("text") or "")
        found = choice.get(_FIELD)
        if found and self._held is not None:
            for value in _list_logprobs(found):
                self._num_tokens += 1
                self._sum += value
                self._min = min(self._min, value)
        if _FIELD in choice and not self._is_requested:
            choice[_FIELD] = None


def _split(events: bytes) -> Iterator[bytes]:
    return iter(events.removesuffix(EVENT_END).split(EVENT_END))


def _list_logprobs(found: dict[str, Any]) -> list[float]:
    """Return the log-probabilities of the tokens in the shape of chats or of text completions."""
    values = found.get("token_logprobs")
    if values is None:
        values = [entry["logprob"] for entry in found.get("content") or ()]
    return [float(value) for value in values if value is not None]
