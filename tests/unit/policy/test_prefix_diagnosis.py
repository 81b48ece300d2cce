"""Diagnosis of prompts against a simulated cache of token blocks: planted causes, healthy prompts, and sums."""

from __future__ import annotations

import json
import random
import re
import uuid
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import Rates
from argosy.policy.prefix_diagnosis import (
    PrefixDiagnosis,
    PrefixTally,
    PromptMemory,
    PromptSegment,
    SegmentKind,
    ServedPrompt,
    diagnose_prompt,
    outline_prompt,
)

WORDS = (
    *(
        "answer",
        "billing",
        "carefully",
        "customer",
        "delivery",
        "every",
        "failure",
        "great",
        "however",
        "invoice",
    ),
    *(
        "journey",
        "kindly",
        "letter",
        "market",
        "never",
        "order",
        "policy",
        "question",
        "refund",
        "shipping",
        "table",
    ),
    *("under", "value", "window", "yellow", "zone", "account", "between", "council", "during"),
)
SECRET = b"secret"
Message = tuple[SegmentKind, str]


def write(rng: random.Random, sentences: int) -> str:
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(6, 16))) for _ in range(sentences)]
    return "".join(f"{line.capitalize()}.{rng.choice((' ', ' ', chr(10)))}" for line in lines)


def write_tools(rng: random.Random, number: int) -> list[str]:
    return [
        json.dumps(
            {
                "type": "function",
                "function": {
                    "name": f"{rng.choice(WORDS)}_{index}",
                    "description": write(rng, 3),
                    "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
                },
            }
        )
        for index in range(number)
    ]


class Chat:
    """A chat as an application sends it."""

    def __init__(self, rng: random.Random, turns: int = 0, tools: int = 4) -> None:
        self.system = write(rng, 30)
        self.tools = write_tools(rng, tools)
        self.messages: list[Message] = []
        for _ in range(turns):
            self.messages += [("user", write(rng, 5)), ("assistant", write(rng, 6))]
        self.messages.append(("user", write(rng, 4)))

    def segments(self) -> list[PromptSegment]:
        parts: list[tuple[SegmentKind, int, str]] = [("system", 1, self.system)]
        parts += [("tool", number, tool) for number, tool in enumerate(self.tools, 1)]
        parts += [(kind, number, text) for number, (kind, text) in enumerate(self.messages, 2)]
        return [PromptSegment(kind, number, text.encode()) for kind, number, text in parts]


class Fleet:
    """Replicas with a cache of 16-token blocks each, and a tokenizer of their own."""

    def __init__(self) -> None:
        self.caches: dict[str, set[int]] = {"a": set(), "b": set()}
        self.resets = 0
        self.memory = PromptMemory()
        self.now = 0.0
        self.input_tokens = 0

    def serve(
        self, chat: Chat, replica: str = "a", *, scope: bytes = b"", session: bytes = b""
    ) -> PrefixDiagnosis:
        self.now += 1
        segments = chat.segments()
        text = "".join(f"<{kind}>{text.decode()}" for kind, _, text in segments) + "<assistant>"
        tokens = re.findall(r"[a-z]{1,7}|[0-9]{1,3}|[^a-z0-9]", text, re.IGNORECASE)
        chain, blocks = hash(scope), list[int]()
        for start in range(0, len(tokens) - 15, 16):
            chain = hash((chain, *tokens[start : start + 16]))
            blocks.append(chain)
        cache, cached = self.caches[replica], 0
        while cached < len(blocks) and blocks[cached] in cache:
            cached += 1
        cache.update(blocks)
        self.input_tokens += len(tokens)
        outline = outline_prompt(segments, SECRET)
        prompt = ServedPrompt(
            outline=outline,
            scope=scope,
            conversation=session or str(outline.opening).encode(),
            prompt_tokens=len(tokens),
            cached_tokens=min(16 * cached, len(tokens) - 1),
            replica=replica,
            cache_resets=self.resets,
            is_cache_full=False,
            sent_at=self.now,
            computed_at=self.now + 0.5,
        )
        found = self.memory.find("tenant", prompt.scope, prompt.conversation)
        diagnosis = diagnose_prompt(prompt, *found)
        self.memory.add("tenant", prompt)
        return diagnosis


def plant_values(*values: Callable[[random.Random], str]) -> Callable[..., PrefixDiagnosis]:
    """Return a fault: a value in the system prompt that differs between two chats of the same template."""

    def plant(rng: random.Random, fleet: Fleet) -> PrefixDiagnosis:
        make = rng.choice(values)
        lead = rng.choice(("Current state: ", "Now it is ", "id=", "(", "Session "))
        chat = Chat(rng, tools=rng.randint(0, 4))
        parts = [write(rng, rng.randint(0, 3)), write(rng, rng.randint(25, 40))]
        diagnosis = None
        for _ in range(3):
            chat.system = f"{parts[0]}{lead}{make(rng)}.\n{parts[1]}"
            chat.messages = [("user", write(rng, 3))]
            diagnosis = fleet.serve(chat)
        assert diagnosis is not None
        return diagnosis

    return plant


def moment(rng: random.Random) -> datetime:
    return datetime.fromtimestamp(rng.randint(10**9, 2 * 10**9), UTC)


def random_word(rng: random.Random) -> str:
    return f"{rng.choice(('req', 'sess', 'trace'))}-{rng.getrandbits(48):012x}9"


def reorder_tools(rng: random.Random, fleet: Fleet) -> PrefixDiagnosis:
    chat = Chat(rng, tools=rng.randint(3, 7))
    fleet.serve(chat)
    chat.tools = chat.tools[1:] + chat.tools[:1] if rng.random() < 0.5 else chat.tools[::-1]
    chat.messages = [("user", write(rng, 3))]
    return fleet.serve(chat)


def respell_tools(rng: random.Random, fleet: Fleet) -> PrefixDiagnosis:
    chat = Chat(rng, tools=rng.randint(3, 6))
    fleet.serve(chat)
    chat.tools = [
        json.dumps(dict(reversed(json.loads(each).items())), sort_keys=False) for each in chat.tools
    ]
    chat.messages = [("user", write(rng, 3))]
    return fleet.serve(chat)


def change_history(rng: random.Random, fleet: Fleet) -> PrefixDiagnosis:
    chat = Chat(rng, turns=rng.randint(4, 8))
    if rng.random() < 0.3:  # messages that differ by a number only
        question = write(rng, 2)
        chat.messages = [
            (kind, f"Turn {number}: {question}" if kind == "user" else text)
            for number, (kind, text) in enumerate(chat.messages)
        ]
    session = rng.choice((b"", b"session 1"))
    fleet.serve(chat, session=session)
    if rng.random() < 0.5:  # the oldest messages are dropped
        del chat.messages[: 2 * rng.randint(1, 2)]
        expected = "history_truncated"
    else:  # they become a summary
        chat.messages[: 2 * rng.randint(1, 2)] = [("user", write(rng, 6))]
        expected = "history_rewritten"
    chat.messages += [("assistant", write(rng, 4)), ("user", write(rng, 3))]
    diagnosis = fleet.serve(chat, session=session)
    assert diagnosis.prompt_cause in {None, "history_truncated", "history_rewritten", expected}
    return diagnosis


def name_user_first(rng: random.Random, fleet: Fleet) -> PrefixDiagnosis:
    chat = Chat(rng, tools=rng.randint(0, 4))
    shared, position = write(rng, 30), rng.choice((0, 3))
    lead, diagnosis = write(rng, position), None
    for _ in range(3):
        names = " and ".join(
            "".join(rng.choices("abcdefghijklm", k=6)).title() for _ in range(rng.randint(1, 6))
        )
        chat.system = f"{lead}You talk to {names}.\n{shared}"
        chat.messages = [("user", write(rng, 3))]
        diagnosis = fleet.serve(chat)
    assert diagnosis is not None
    return diagnosis


FAULTS: dict[str, tuple[set[str], Callable[[random.Random, Fleet], PrefixDiagnosis]]] = {
    "time": (
        {"time", "date"},
        plant_values(
            lambda rng: moment(rng).isoformat(),
            lambda rng: moment(rng).strftime("%H:%M"),
            lambda rng: moment(rng).strftime("%A, %d %B %Y, %I:%M %p"),
            lambda rng: moment(rng).strftime("%b %d, %Y"),
            lambda rng: str(int(moment(rng).timestamp())),
        ),
    ),
    "uuid": ({"uuid"}, plant_values(lambda rng: str(uuid.UUID(int=rng.getrandbits(128))))),
    "random id": ({"random_id"}, plant_values(random_word)),
    "counter": ({"number"}, plant_values(lambda rng: str(rng.randint(1, 99999)))),
    "tools in another order": ({"tools_reordered"}, reorder_tools),
    "keys of JSON": ({"json_spelling"}, respell_tools),
    "history": ({"history_truncated", "history_rewritten"}, change_history),
    "user before shared text": ({"variable_text"}, name_user_first),
}
VARIANTS = 25


@pytest.mark.parametrize("name", FAULTS)
def test_planted_cause_is_found(name: str) -> None:
    """25 variants of each of 8 causes; at most one of a cause may be missed (200 in all, 95 %)."""
    causes, plant = FAULTS[name]
    found = Counter[str | None]()
    for seed in range(VARIANTS):
        fleet = Fleet()
        diagnosis = plant(random.Random(f"{name} {seed}"), fleet)
        found[diagnosis.prompt_cause] += 1
        assert diagnosis.lost_by_placement_tokens == 0, seed
        assert diagnosis.unavoidable_tokens >= 0
    assert sum(found[cause] for cause in causes) >= VARIANTS - 1, found


def evict(fleet: Fleet) -> str:
    fleet.caches["a"].clear()
    return "a"


def restart(fleet: Fleet) -> str:
    fleet.resets += 1
    return evict(fleet)


PLACEMENTS: dict[str, Callable[[Fleet], str]] = {
    "evicted": evict,
    "cold_replica": restart,
    "routed_elsewhere": lambda _: "b",
}


@pytest.mark.parametrize("cause", PLACEMENTS)
@pytest.mark.parametrize("turns", [0, 4])
def test_good_prompts_are_not_blamed(cause: str, turns: int) -> None:
    """A chat that grows, and chats of one template, lose tokens by their placement only."""
    for seed in range(VARIANTS):
        rng, fleet = random.Random(f"{cause} {seed}"), Fleet()
        chat = Chat(rng, turns=turns)
        first = fleet.serve(chat)
        assert (first.cached_tokens, first.prompt_cause) == (0, None)
        if turns:
            chat.messages += [("assistant", write(rng, 6)), ("user", write(rng, 4))]
        else:
            chat.messages = [("user", write(rng, 4))]
        assert fleet.serve(chat).lost_by_prompt_tokens == 0
        replica = PLACEMENTS[cause](fleet)
        chat.messages = [*chat.messages[:-1], ("user", f"{write(rng, 3)} At 12:{seed:02d}, 7.")]
        lost = fleet.serve(chat, replica)
        assert (lost.prompt_cause, lost.lost_by_prompt_tokens) == (None, 0)
        assert lost.placement_cause == cause
        assert lost.lost_by_placement_tokens > 0.7 * (lost.unavoidable_tokens + 400)
        other = fleet.serve(chat, scope=b"another cache salt")
        assert other.is_separate_cache
        assert (other.prompt_cause, other.placement_cause) == (None, None)


def test_prompts_that_arrive_together_lose_nothing() -> None:
    rng, fleet = random.Random(1), Fleet()
    chat = Chat(rng)
    fleet.serve(chat)
    fleet.now -= 0.8  # the first one has no token yet
    fleet.caches["a"].clear()
    diagnosis = fleet.serve(chat)
    assert diagnosis.lost_by_placement_tokens == diagnosis.lost_by_prompt_tokens == 0


def test_report_adds_up_and_estimates_a_day() -> None:
    rng, fleet, tally = random.Random(3), Fleet(), PrefixTally(now=1000)
    chat = Chat(rng, tools=5)
    for _ in range(4):
        diagnosis = fleet.serve(chat)
        tally.add(diagnosis, weight=50, rates=Rates(10, 1, 7), prefill_tokens_per_s=500)
        chat.tools = chat.tools[2:] + chat.tools[:2]
    report = tally.report("org", "project", "big", now=1000 + 43_200)
    classes = (
        *(report.cached_tokens, report.unavoidable_tokens),
        *(report.lost_by_prompt_tokens, report.lost_by_placement_tokens),
    )
    assert sum(classes) == report.input_tokens == fleet.input_tokens
    (finding,) = report.findings
    assert (finding.segment, finding.requests) == ("tools", 3)
    assert finding.tokens == report.lost_by_prompt_tokens
    assert finding.tokens_per_day == 2 * 50 * finding.tokens
    assert finding.nano_dollars_per_day == 9 * finding.tokens_per_day
    assert finding.saved_ttft_s == pytest.approx(finding.tokens / 3 / 500)
    assert finding.advice.startswith("Tools, about token")


def test_memory_keeps_tenants_apart_and_is_bounded() -> None:
    rng, fleet = random.Random(2), Fleet()
    fleet.memory = PromptMemory(max_bytes=40_000)
    for number in range(50):
        fleet.serve(Chat(rng), session=b"%d" % number)
    same, separate = fleet.memory.find("tenant", b"", b"49")
    assert 2 < len(same) < 17
    assert separate == []
    assert fleet.memory.find("other", b"", b"49") == ([], [])
    assert fleet.memory.find("tenant", b"", b"0")[0][0].sent_at == same[0].sent_at


@pytest.mark.parametrize("text", ["1 ", "a\n", "b"])
def test_work_for_hostile_prompts_is_bounded(text: str) -> None:
    """Millions of values, lines, or bytes without an end take few pieces and masks."""
    segment = PromptSegment("user", 1, text.encode() * 1_000_000)
    outline = outline_prompt([segment], SECRET)
    assert len(outline.exact) <= 4097
    assert len(outline.mask_values) <= 4096
    assert outline.memory_bytes < 300_000


values = st.sampled_from(["x", "12:30", "42", "deadbeef99", "\ud800", '{"b": 1, "a": 2}', "A b.\n"])
texts = st.lists(values, max_size=40).map("".join)
kinds: st.SearchStrategy[Any] = st.sampled_from(["system", "tool", "user", "assistant", "text"])
prompts = st.lists(st.tuples(kinds, texts), max_size=5)


@given(
    st.lists(
        st.tuples(
            prompts,
            st.integers(0, 5000),
            st.integers(0, 6000),
            st.sampled_from(["a", "b"]),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_each_token_is_in_one_class(served: list[Any]) -> None:
    earlier = list[ServedPrompt]()
    for number, (parts, tokens, cached, replica, is_full) in enumerate(served):
        segments = [
            PromptSegment(kind, index, text.encode(errors="replace"))
            for index, (kind, text) in enumerate(parts)
        ]
        prompt = ServedPrompt(
            outline=outline_prompt(segments, SECRET),
            scope=b"",
            conversation=b"",
            prompt_tokens=tokens,
            cached_tokens=cached,
            replica=replica,
            cache_resets=0,
            is_cache_full=is_full,
            sent_at=number,
            computed_at=number,
        )
        diagnosis = diagnose_prompt(prompt, earlier)
        classes = (
            diagnosis.cached_tokens,
            diagnosis.unavoidable_tokens,
            diagnosis.lost_by_prompt_tokens,
            diagnosis.lost_by_placement_tokens,
        )
        assert sum(classes) == tokens
        assert min(classes) >= 0
        assert (diagnosis.prompt_cause is not None) == (diagnosis.lost_by_prompt_tokens > 0)
        assert (diagnosis.placement_cause is not None) == (diagnosis.lost_by_placement_tokens > 0)
        earlier.insert(0, prompt)
