"""Comparison of a served prompt with earlier ones: the class of each token, and the causes of those that were lost.

A gateway has no tokenizer. Positions are therefore weights of the outline, by which the tokens of the whole prompt,
which are exact, are divided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Literal, NamedTuple

import msgspec

from argosy.policy.prefix_diagnosis.outline import MaskKind, PromptOutline, SegmentKind

PromptCause = (
    MaskKind
    | Literal[
        "tools_reordered",
        "tools_changed",
        "json_spelling",
        "history_truncated",
        "history_rewritten",
        "variable_text",
    ]
)
"""Why a prompt does not match an earlier one. The kind of a value stands for one that changes with each request."""
PlacementCause = Literal["evicted", "cold_replica", "routed_elsewhere"]
"""Why a prompt was not found in a cache that had computed it."""
BLOCK_TOKENS = 16
"""Tokens of a block of the KV cache in most engines, of which only whole ones are reused."""
MIN_LOST_TOKENS = 32
"""Tokens from which a difference between prompts counts as a loss."""
MIN_PLACEMENT_SHARE = 8
"""A loss by placement below the common prefix divided by this may be an error of the estimate."""
MIN_RUN_WEIGHT = 128
"""Weight of equal pieces after a difference, from which they count."""
MIN_REALIGNED_WEIGHT = 256
"""Weight of equal pieces by which two prompts continue alike after different text."""
MAX_SKIPPED_PIECES = 1024
"""Pieces in which the continuation is searched."""
MAX_TRIED_RUNS = 128
"""Short equal parts that are passed over in one search, which bounds the work for prompts of equal lines."""
_HISTORY_CAUSES = frozenset[PromptCause]({"history_truncated", "history_rewritten"})
"""Causes that go before a changed value, since the messages of a history are alike."""
MAX_DIFFERENCES = 32
"""Differences that are followed in one comparison."""


class ServedPrompt(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Prompt that a replica has computed. Times are seconds on one clock."""

    outline: PromptOutline
    scope: bytes
    """Digest of what separates caches: model, version, adapter, cache domain, cache salt, template arguments."""
    conversation: bytes
    """Digest of the session, or else of the first message of a user. Empty if there is neither."""
    prompt_tokens: int
    """Tokens of the prompt, as in the ledger."""
    cached_tokens: int
    """Tokens that the replica had cached."""
    replica: str
    cache_resets: int
    """How often the replica's cache was found to be empty before."""
    is_cache_full: bool
    """Whether the replica had no free blocks."""
    sent_at: float
    """When the prompt was sent."""
    computed_at: float
    """When its first output token had arrived, so that later prompts could use its blocks."""


class PrefixDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a prompt by class, whose sum is its size, and the causes of the losses."""

    cached_tokens: int
    unavoidable_tokens: int
    """Tokens that no earlier prompt had, and those that are computed anyway."""
    lost_by_prompt_tokens: int
    """Tokens of an earlier prompt behind a difference that can be avoided."""
    lost_by_placement_tokens: int
    """Tokens that a replica had computed before."""
    prompt_cause: PromptCause | None = None
    segment: tuple[SegmentKind, int] | None = None
    """Kind and number of the segment with the difference."""
    position_tokens: int = 0
    """Tokens of the prompt before the difference."""
    placement_cause: PlacementCause | None = None
    is_separate_cache: bool = False
    """Whether an earlier prompt would have matched with the same model, version, adapter, tenant and cache salt."""
    is_upper_bound: bool = False
    """Whether the cache was full, so that the tokens lost by the prompt might have been evicted anyway."""


class _Fault(NamedTuple):
    """First avoidable difference."""

    cause: PromptCause
    at_weight: int
    segment: tuple[SegmentKind, int]


class _Difference(NamedTuple):
    """A difference, and where both prompts continue alike."""

    cause: PromptCause | None
    """None if it is a part of another difference."""
    offset: int
    """Weight of the new prompt's piece before it."""
    new_piece: int
    old_piece: int
    has_content: bool = False
    """Whether the skipped pieces of the new prompt have the same content as the old ones."""


class _Comparison(NamedTuple):
    prefix_weight: int
    """Weight before the first difference."""
    fault: _Fault | None
    runs: Sequence[tuple[int, int]]
    """Beginning and end of the equal parts after the fault."""


def diagnose_prompt(
    prompt: ServedPrompt, earlier: Sequence[ServedPrompt], separate: Sequence[ServedPrompt] = ()
) -> PrefixDiagnosis:
    """Return the diagnosis of a prompt.

    Args:
        prompt: The prompt.
        earlier: Earlier prompts of the same scope, latest first. Those whose blocks did not exist yet are left out.
        separate: Earlier prompts of other scopes of the tenant.
    """
    ready = [each for each in earlier if each.computed_at <= prompt.sent_at]
    total = prompt.prompt_tokens
    cached = min(prompt.cached_tokens, total)
    prefixes = [_common_tokens(prompt, each) for each in ready]
    known = max(prefixes, default=0)
    by_placement = known - cached
    if by_placement < max(BLOCK_TOKENS, known // MIN_PLACEMENT_SHARE):
        by_placement = 0
    placement_cause = None
    if by_placement:
        holders = [
            each
            for each, tokens in zip(ready, prefixes, strict=True)
            if tokens >= known - BLOCK_TOKENS
        ]
        placement_cause = _find_placement_cause(prompt, holders)
    by_prompt, fault = 0, None
    closest = _find_closest(prompt, ready)
    if closest is not None:
        comparison = _compare(prompt.outline, closest.outline, is_same=_is_same(prompt, closest))
        fault = comparison.fault
        by_prompt = _count_avoidable(prompt, comparison, max(known, cached))
        if by_prompt < MIN_LOST_TOKENS:
            by_prompt, fault = 0, None
    found = max(known, cached)
    is_separate = any(
        _common_tokens(prompt, each) >= found + max(BLOCK_TOKENS, found // MIN_PLACEMENT_SHARE)
        for each in separate
        if each.computed_at <= prompt.sent_at
    )
    return PrefixDiagnosis(
        cached_tokens=cached,
        lost_by_placement_tokens=by_placement,
        lost_by_prompt_tokens=by_prompt,
        unavoidable_tokens=total - cached - by_placement - by_prompt,
        prompt_cause=None if fault is None else fault.cause,
        segment=None if fault is None else fault.segment,
        position_tokens=0
        if fault is None
        else total * fault.at_weight // max(1, prompt.outline.total_weight),
        placement_cause=placement_cause,
        is_separate_cache=is_separate,
        is_upper_bound=fault is not None and (prompt.is_cache_full or placement_cause == "evicted"),
    )


def _is_same(first: ServedPrompt, second: ServedPrompt) -> bool:
    return bool(first.conversation) and first.conversation == second.conversation


def _common_tokens(prompt: ServedPrompt, other: ServedPrompt) -> int:
    """Estimate the tokens of whole blocks in the common prefix; the last token of a prompt is always computed.

    The shorter prompt gives the estimate, because less of it is outside the prefix.
    """
    new, old = prompt.outline, other.outline
    prefix = _compare(new, old, is_same=False, follows=False).prefix_weight
    shorter = min(prompt, other, key=lambda each: each.outline.total_weight)
    tokens = shorter.prompt_tokens * prefix // max(1, shorter.outline.total_weight)
    tokens = min(tokens, prompt.prompt_tokens - 1)
    return max(0, tokens) // BLOCK_TOKENS * BLOCK_TOKENS


def _find_placement_cause(prompt: ServedPrompt, holders: Sequence[ServedPrompt]) -> PlacementCause:
    own = [each for each in holders if each.replica == prompt.replica]
    if not own:
        return "routed_elsewhere"
    if any(each.cache_resets == prompt.cache_resets for each in own):
        return "evicted"
    return "cold_replica"


def _find_closest(prompt: ServedPrompt, earlier: Sequence[ServedPrompt]) -> ServedPrompt | None:
    """Return the latest prompt of the conversation, or else the one with most text in common."""
    for each in earlier:
        if _is_same(prompt, each):
            return each
    pieces = set(prompt.outline.masked)

    def count_common(other: ServedPrompt) -> int:
        starts = other.outline.starts
        return sum(
            starts[index + 1] - starts[index]
            for index, each in enumerate(other.outline.masked)
            if each in pieces
        )

    return max(earlier, key=count_common, default=None)


def _count_avoidable(prompt: ServedPrompt, comparison: _Comparison, found_tokens: int) -> int:
    """Return the tokens in equal parts behind those that were found in a cache or known to be computed."""
    if comparison.fault is None:
        return 0
    total, size = prompt.prompt_tokens, max(1, prompt.outline.total_weight)
    bound = max(comparison.prefix_weight, -(-found_tokens * size // max(1, total)))
    lost = sum(max(0, end - max(start, bound)) for start, end in comparison.runs)
    return max(0, min(total * lost // size, total - 1 - found_tokens))


def _compare(
    new: PromptOutline, old: PromptOutline, *, is_same: bool, follows: bool = True
) -> _Comparison:
    """Compare two prompts from their beginning.

    Args:
        new: The prompt.
        old: The earlier one.
        is_same: Whether both belong to one conversation.
        follows: Whether the comparison goes on behind the first difference.
    """
    i = j = run_start = 0
    prefix: int | None = None
    fault: _Fault | None = None
    runs = list[tuple[int, int]]()
    for _ in range(MAX_DIFFERENCES):
        while i < len(new.exact) and j < len(old.exact) and new.exact[i] == old.exact[j]:
            i, j = i + 1, j + 1
        difference = None
        if i < len(new.exact) and j < len(old.exact):
            difference = _find_difference(new, old, i, j, is_same=is_same, follows=follows)
        if difference is not None and difference.cause is None:
            i, j = difference.new_piece, difference.old_piece
            continue
        if fault is not None:
            _add_run(runs, new.starts[run_start], new.starts[i])
        if prefix is None:
            prefix = new.starts[i] + (0 if difference is None else difference.offset)
        if difference is None or difference.cause is None or not follows:
            break
        if fault is None:
            fault = _Fault(difference.cause, prefix, new.segments[new.segment_of(i)])
        run_start = i if difference.has_content else difference.new_piece
        i, j = difference.new_piece, difference.old_piece
    return _Comparison(new.starts[i] if prefix is None else prefix, fault, runs)


def _add_run(runs: list[tuple[int, int]], start: int, end: int) -> None:
    if end - start >= MIN_RUN_WEIGHT:
        runs.append((start, end))


def _find_difference(
    new: PromptOutline, old: PromptOutline, i: int, j: int, *, is_same: bool, follows: bool
) -> _Difference | None:
    """Return the difference at these pieces; None if the prompts do not continue alike."""
    new_segment, old_segment = new.segment_of(i), old.segment_of(j)
    kinds = new.segments[new_segment][0], old.segments[old_segment][0]
    are_tools = kinds == ("tool", "tool")
    if are_tools and i == new.segment_starts[new_segment] and j == old.segment_starts[old_segment]:
        return _compare_tools(new, old, new_segment, old_segment)
    continued = _realign(new, old, i, j, is_same=is_same) if follows else None
    if continued is not None and continued.cause in _HISTORY_CAUSES:
        return continued
    if new.masked[i] == old.masked[j]:
        pairs = zip(new.masks_of(i), old.masks_of(j), strict=False)
        changed = next((one for one, other in pairs if one[2] != other[2]), None)
        if changed is not None:
            return _Difference(changed[0], changed[1], i + 1, j + 1)
    return continued


def _compare_tools(
    new: PromptOutline, old: PromptOutline, new_segment: int, old_segment: int
) -> _Difference:
    """Compare the descriptions of two tools that are not spelled alike."""
    start, end = new.segment_range(new_segment)
    old_start, old_end = old.segment_range(old_segment)
    if new.exact[start + 1 : end] == old.exact[old_start + 1 : old_end]:
        return _Difference("json_spelling", 0, start + 1, old_start + 1)
    (tools, new_end), (old_tools, old_end) = _list_tools(new), _list_tools(old)
    if tools != old_tools and Counter(tools) == Counter(old_tools):
        return _Difference("tools_reordered", 0, new_end, old_end, has_content=True)
    return _Difference(None, 0, start + 1, old_start + 1)


def _list_tools(outline: PromptOutline) -> tuple[list[bytes], int]:
    """Return the content of each tool, and the index of the first piece behind the last one."""
    tools, end = list[bytes](), 0
    for segment, (kind, _) in enumerate(outline.segments):
        if kind == "tool":
            start, end = outline.segment_range(segment)
            tools.append(outline.exact[start + 1 : end].tobytes())
    return tools, end


def _realign(
    new: PromptOutline, old: PromptOutline, i: int, j: int, *, is_same: bool
) -> _Difference | None:
    """Return the different text before the nearest part that both prompts have.

    In messages of another conversation, it is searched within the same message only, since people and tools repeat
    themselves. Only whole messages, of which one is the model's, show that a history was changed.
    """
    later = dict[int, int]()
    for piece in range(min(len(old.exact), j + MAX_SKIPPED_PIECES) - 1, j - 1, -1):
        later[old.exact[piece]] = piece
    segment = new.segment_of(i)
    kind = new.segments[segment][0]
    is_message = kind not in {"system", "tool", "text"}
    starts = range(i, min(len(new.exact), i + MAX_SKIPPED_PIECES))
    found = (start for start in starts if new.exact[start] in later)
    for start in islice(found, MAX_TRIED_RUNS):
        old_start = later[new.exact[start]]
        end, old_end = start, old_start
        while (
            end < len(new.exact)
            and old_end < len(old.exact)
            and new.exact[end] == old.exact[old_end]
        ):
            end, old_end = end + 1, old_end + 1
        if new.starts[end] - new.starts[start] < MIN_REALIGNED_WEIGHT:
            continue
        if is_message and _is_history(new, start, end, is_same=is_same):
            is_truncated = start == i
            cause: PromptCause = "history_truncated" if is_truncated else "history_rewritten"
            return _Difference(cause, 0, start, old_start)
        if is_message and new.segment_of(start) != segment:
            return None
        return _Difference(
            "tools_changed" if kind == "tool" else "variable_text", 0, start, old_start
        )
    return None


def _is_history(outline: PromptOutline, start: int, end: int, *, is_same: bool) -> bool:
    """Return whether pieces are messages of a history."""
    if is_same:
        return True
    first, last = outline.segment_of(start), outline.segment_of(end - 1)
    kinds = {kind for kind, _ in outline.segments[first : last + 1]}
    return last > first and start == outline.segment_starts[first] and "assistant" in kinds
