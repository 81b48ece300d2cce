"""Truncation of conversations: what stays, what goes together, and cuts that do not move while a conversation grows."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from argosy.policy import build_summary_prompt, format_ranges, insert_summary, list_cuts

ROLES = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}


def conversation(letters: str) -> list[dict[str, Any]]:
    """Return messages by their roles: system, user, assistant, call, result of a tool."""
    return [
        {"role": ROLES[each]} | ({"tool_calls": [1]} if each == "c" else {}) for each in letters
    ]


def cut(letters: str, step: int = 1, **options: bool) -> list[tuple[int, ...]]:
    return list_cuts(conversation(letters), lambda _: 1, step, **options)


def test_drops_whole_turns_and_calls_with_their_results() -> None:
    for letters, expected in (
        ("", []),
        ("su", []),
        ("suaua", [(1, 2)]),
        ("suauau", [(1, 2), (1, 2, 3, 4)]),
        ("sasuu", [(1,), (1, 3)]),
        ("uctau", [(0, 1, 2, 3)]),
        ("ucttctta", [(1, 2, 3), (1, 2, 3, 4, 5, 6)]),
        ("uctct", [(1, 2)]),
        ("tt", []),
    ):
        assert cut(letters) == expected, letters
    assert cut("suauau", keeps_first_turn=True) == [(3, 4)]
    assert cut("suauauau", 3) == [(1, 2, 3, 4), (1, 2, 3, 4, 5, 6)]
    assert format_ranges((1, 2, 3, 7, 9, 10)) == (
        "messages[1:4]",
        "messages[7:8]",
        "messages[9:11]",
    )


@given(
    st.text("suact", max_size=40), st.text("uact", max_size=10), st.integers(1, 9), st.booleans()
)
def test_cuts_keep_what_must_stay_and_do_not_move(
    letters: str, more: str, step: int, keeps_first_turn: bool
) -> None:
    messages = conversation(letters)
    cuts = cut(letters, step, keeps_first_turn=keeps_first_turn)
    assert cuts == sorted(cuts, key=len)
    for dropped in cuts:
        kept = [each for index, each in enumerate(messages) if index not in set(dropped)]
        summarised = insert_summary(messages, dropped, "all")
        turn = next(index for index, each in enumerate(summarised) if "content" in each)
        assert [*summarised[:turn], *summarised[turn + 2 :]] == kept
        assert [each["role"] for each in summarised[turn : turn + 2]] == ["user", "assistant"]
        assert "all" in summarised[turn]["content"]
        assert [each for each in kept if each["role"] == "system"] == [
            each for each in messages if each["role"] == "system"
        ]
        questions = [index for index, each in enumerate(letters) if each == "u"]
        assert not questions or questions[-1] not in dropped
        assert len(messages) - 1 not in dropped or letters.endswith("s")
        for index, each in enumerate(letters):  # a result stays or goes with what is before it
            if each == "t" and index and letters[index - 1] in "ct":
                assert (index in dropped) == (index - 1 in dropped)
    if "u" in letters:
        grown = cut(letters + "u" + more, step, keeps_first_turn=keeps_first_turn)
        turns = [each for each in cuts[:-1] if each[-1] < letters.rindex("u")]
        assert grown[: len(turns)] == turns


def test_prompt_of_a_summary_has_texts_and_calls_up_to_a_bound() -> None:
    call = {"function": {"name": "find", "arguments": '{"id": 7}'}}
    parts = [{"type": "text", "text": "see"}, {"type": "image_url"}, 3]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x" * 500},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call, 1]},
        {"role": "assistant", "tool_calls": 1},
    ]
    prompt = build_summary_prompt(messages, 120, 50)
    assert 'user: see [image_url]\nassistant:  find({"id": 7})\nassistant: ' in prompt
    assert "at most 50 words" in prompt
    assert prompt.count("x" * 10) < 10
