"""Sums of the diagnoses of one project and model: tokens by class, and each cause with its remedy and its cost."""

from __future__ import annotations

from typing import Literal

import msgspec

from argosy.policy.prefix_diagnosis.diagnosis import PlacementCause, PrefixDiagnosis, PromptCause
from argosy.policy.prefix_diagnosis.outline import SegmentKind
from argosy.policy.reservation import NO_CHARGE, Rates

TokenClass = Literal["unavoidable", "lost_by_prompt", "lost_by_placement"]
FindingCause = PromptCause | PlacementCause | Literal["separate_cache"]
MAX_FINDINGS = 64
"""Findings that are kept. Further ones count in the classes only."""
DAY_S = 86_400.0
MIN_PERIOD_S = 60.0
"""Shortest period from which the savings of a day are estimated."""
_SEGMENTS: dict[FindingCause, str] = {
    "tools_reordered": "tools",
    "tools_changed": "tools",
    "history_truncated": "history",
    "history_rewritten": "history",
}
"""Parts of prompts that these causes concern, whichever tool or message differs first."""
_MOVE = "Move it behind the text that all requests share, such as into the last message"
_REMEDIES: dict[FindingCause, str] = {
    "time": f"A time changes here with each request. {_MOVE}, or round it to the day.",
    "date": f"A date changes here. {_MOVE}.",
    "uuid": f"A UUID changes here with each request. {_MOVE}, or leave it out.",
    "random_id": f"An id changes here with each request. {_MOVE}, or leave it out.",
    "number": f"A number changes here with each request. {_MOVE}, or leave it out.",
    "path": f"A path changes here. {_MOVE}.",
    "tools_reordered": "The same tools are sent in another order. Sort them by name.",
    "tools_changed": "Tools are added or removed before others. Send the same tools, or add new ones at the end.",
    "json_spelling": "The same tool is sent with its JSON keys in another order. Serialise it once, with sorted keys.",
    "history_truncated": "The oldest messages are dropped at each turn. Drop many of them at once, and seldom.",
    "history_rewritten": "Earlier messages are changed. Append to the history only, and compact it seldom.",
    "variable_text": f"Text that differs between requests stands before text that all share. {_MOVE}.",
    "evicted": (
        "The replica had computed these tokens, and had lost them. Give it more memory for its KV cache. If it never "
        "reports cached tokens, turn its prefix cache on."
    ),
    "cold_replica": "The replica had computed these tokens before it was restarted. No change is needed.",
    "routed_elsewhere": (
        "Another replica had computed these tokens. Use the routing policy least-cost, and send a session id."
    ),
    "separate_cache": (
        "The prompt is known to another version, adapter, cache salt or template argument, whose cache is separate. "
        "Send the same arguments where the prompts may share a cache."
    ),
}


class PrefixFinding(msgspec.Struct, kw_only=True):
    """Cause by which prompts miss the cache, and what its removal would save."""

    cause: FindingCause
    token_class: TokenClass
    segment: str
    """Part of the prompt, such as `system prompt`, `tool 2` or `history`; empty if no part is to blame."""
    position_tokens: int
    """Tokens before the difference, by estimate, in the latest of the prompts."""
    requests: int = 0
    tokens: int = 0
    """Tokens that were lost, of the requests that were examined."""
    input_share: float = 0.0
    """Their share of the tokens of all prompts that were examined."""
    saved_ttft_s: float = 0.0
    """Mean seconds by which the first token of such a request would arrive earlier."""
    tokens_per_day: int = 0
    nano_dollars_per_day: int = 0
    """Savings of the project in a day, by the difference between the prices of input and of cached input."""
    is_upper_bound: bool = False
    """Whether a cache was full, so that the fix may save less."""
    advice: str = ""


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the prompts of a project use the prefix cache of a model. The tokens of the classes add up to the input."""

    organisation: str | None
    project: str | None
    model: str
    since: float
    """Seconds since the epoch from which prompts are counted."""
    requests: int
    """Requests whose prompts were examined."""
    skipped_requests: int
    """Requests that were to be examined, but were too large or too many."""
    input_tokens: int
    cached_tokens: int
    unavoidable_tokens: int
    lost_by_prompt_tokens: int
    lost_by_placement_tokens: int
    findings: list[PrefixFinding]
    """Causes of losses, the costliest first."""


class PrefixTally:
    """Sums of the diagnoses of one project and model."""

    def __init__(self, now: float) -> None:
        self.since = now
        self.skipped_requests = 0
        self._requests = 0
        self._tokens = [0, 0, 0, 0]
        """Cached, unavoidable, lost by the prompt, lost by placement."""
        self._findings: dict[tuple[FindingCause, str], PrefixFinding] = {}
        """Findings, in which the values of a day are sums of weighted requests."""
        self._lost_s: dict[tuple[FindingCause, str], float] = {}

    def add(
        self,
        diagnosis: PrefixDiagnosis,
        *,
        weight: float = 1.0,
        rates: Rates = NO_CHARGE,
        prefill_tokens_per_s: float = 0.0,
    ) -> None:
        """Add the diagnosis of a request.

        Args:
            diagnosis: The diagnosis.
            weight: Number of requests that it stands for.
            rates: Prices of the request.
            prefill_tokens_per_s: Rate at which its replica computes prompts; 0 if unknown.
        """
        self._requests += 1
        values = (
            diagnosis.cached_tokens,
            diagnosis.unavoidable_tokens,
            diagnosis.lost_by_prompt_tokens,
            diagnosis.lost_by_placement_tokens,
        )
        self._tokens = [old + new for old, new in zip(self._tokens, values, strict=True)]
        found: list[tuple[FindingCause, TokenClass, int]] = []
        if diagnosis.prompt_cause is not None:
            found.append((diagnosis.prompt_cause, "lost_by_prompt", values[2]))
        if diagnosis.placement_cause is not None:
            found.append((diagnosis.placement_cause, "lost_by_placement", values[3]))
        if diagnosis.is_separate_cache:
            found.append(("separate_cache", "unavoidable", 0))
        saved_per_token = max(0, rates.input - rates.cached_input)
        for cause, token_class, tokens in found:
            is_prompt = cause == diagnosis.prompt_cause
            segment = _describe_segment(cause, diagnosis.segment) if is_prompt else ""
            key = cause, segment
            if key not in self._findings and len(self._findings) >= MAX_FINDINGS:
                continue
            finding = self._findings.setdefault(
                key,
                PrefixFinding(
                    cause=cause, token_class=token_class, segment=segment, position_tokens=0
                ),
            )
            finding.position_tokens = diagnosis.position_tokens if is_prompt else 0
            finding.requests += 1
            finding.tokens += tokens
            finding.tokens_per_day += round(tokens * weight)
            finding.nano_dollars_per_day += round(tokens * weight * saved_per_token)
            finding.is_upper_bound |= is_prompt and diagnosis.is_upper_bound
            if prefill_tokens_per_s > 0:
                lost_s = self._lost_s.get(key, 0.0) + tokens / prefill_tokens_per_s
                self._lost_s[key] = lost_s

    def report(
        self, organisation: str | None, project: str | None, model: str, now: float
    ) -> PrefixReport:
        """Return the report at a time in seconds since the epoch."""
        total = sum(self._tokens)
        days = max(now - self.since, MIN_PERIOD_S) / DAY_S
        findings = [
            msgspec.structs.replace(
                finding,
                input_share=finding.tokens / total if total else 0.0,
                saved_ttft_s=self._lost_s.get(key, 0.0) / finding.requests,
                tokens_per_day=round(finding.tokens_per_day / days),
                nano_dollars_per_day=round(finding.nano_dollars_per_day / days),
                advice=_advise(finding),
            )
            for key, finding in self._findings.items()
        ]
        findings.sort(key=lambda each: -each.tokens)
        cached, unavoidable, by_prompt, by_placement = self._tokens
        return PrefixReport(
            organisation=organisation,
            project=project,
            model=model,
            since=self.since,
            requests=self._requests,
            skipped_requests=self.skipped_requests,
            input_tokens=total,
            cached_tokens=cached,
            unavoidable_tokens=unavoidable,
            lost_by_prompt_tokens=by_prompt,
            lost_by_placement_tokens=by_placement,
            findings=findings,
        )


def _describe_segment(cause: FindingCause, segment: tuple[SegmentKind, int] | None) -> str:
    if segment is None:
        return ""
    if cause in _SEGMENTS:
        return _SEGMENTS[cause]
    kind, number = segment
    if kind == "tool":
        return f"tool {number}"
    if kind == "system":
        return "system prompt" if number == 1 else f"system prompt (message {number})"
    return "prompt" if kind == "text" else f"message {number} ({kind})"


def _advise(finding: PrefixFinding) -> str:
    remedy = _REMEDIES[finding.cause]
    if not finding.segment:
        return remedy
    return f"{finding.segment.capitalize()}, about token {finding.position_tokens}: {remedy}"
