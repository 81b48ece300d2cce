"""Constrained sampling: constraints of single sequences, compiled grammars, and constrained requests in the core."""

from __future__ import annotations

import gc
import json
import random
import threading
import weakref
from functools import cache
from typing import Any

import jsonschema_rs
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.kernels.torch.logit_edits import TokenMasks
from argosy.engine.grammar import (
    GrammarCompiler,
    GrammarError,
    GrammarTokenizer,
    TokenConstraint,
    build_grammar_tokenizer,
)
from argosy.engine.grammar.token_mask import build_mask
from argosy.engine.serving.engine_core.core import EngineCore
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.models import BUNDLED_MODEL
from argosy.protocol import ReasoningBlock, SamplingParams
from tests.engine.core_driver import RequestOutput, create_core, run_requests

VOCAB_SIZE = 4108
"""The bundled vocabulary with four padding ids."""
END, STOP = 4, 300
"""The model's end-of-sequence token, and a stop token of the request."""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: build_grammar_tokenizer(tokenizer(), VOCAB_SIZE))


def lark(rules: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": rules}]})


def json_grammar(schema: dict[str, Any]) -> str:
    compact = schema | {"x-guidance": {"whitespace_flexible": False}}
    return json.dumps({"grammars": [{"json_schema": compact}]})


def create_constraint(params: SamplingParams) -> TokenConstraint:
    grammar = compiler().submit(params.grammar).result() if params.grammar else None
    return TokenConstraint(
        params, vocab_size=VOCAB_SIZE, grammar=grammar, eos_token_ids=[END, VOCAB_SIZE + 9]
    )


def allowed_tokens(constraint: TokenConstraint) -> list[int]:
    """Return the ids that the constraint allows next."""
    row = build_mask(np.zeros(VOCAB_SIZE, bool))
    matcher = constraint.active_matcher
    if matcher is not None:
        row = np.frombuffer(bytearray(matcher.compute_bitmask()), np.int32).copy()
    constraint.complete_row(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def allowed_texts(constraint: TokenConstraint) -> set[str]:
    return {tokenizer().token_text(token) for token in allowed_tokens(constraint)}


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


AB = lark('start: "a" "b"?')


@pytest.mark.parametrize(
    ("changes", "after_nothing", "after_a", "after_ab"),
    [
        ({}, "a ab", "b <|end|>", "<|end|>"),
        ({"min_tokens": 2}, "a ab", "b", "<|end|>"),
        ({"min_tokens": 9}, "a ab", "b", "<|end|>"),
        ({"ignore_eos": True}, "a ab", "b", "<|end|>"),
        ({"stop_token_ids": (STOP,)}, "a ab", "b <|end|> STOP", "<|end|> STOP"),
        ({"stop_token_ids": (STOP,), "ignore_eos": True}, "a ab", "b STOP", "<|end|> STOP"),
        ({"allowed_token_ids": ("a", "b")}, "a", "b", "<|end|>"),
        ({"banned_token_ids": ("b", "ab")}, "a", "<|end|>", "<|end|>"),
    ],
)
def test_end_tokens_are_allowed_where_grammar_accepts(
    changes: dict[str, Any], after_nothing: str, after_a: str, after_ab: str
) -> None:
    ids = {"STOP": STOP, "<|end|>": END} | {text: encode(text)[0] for text in ("a", "b", "ab")}
    changes = {
        name: tuple(ids.get(i, i) for i in value) if isinstance(value, tuple) else value
        for name, value in changes.items()
    }
    params = SamplingParams(grammar=AB, **changes)
    for output, expected in (([], after_nothing), (["a"], after_a), (["a", "b"], after_ab)):
        constraint = create_constraint(params)
        constraint.accept([ids[text] for text in output])
        assert set(allowed_tokens(constraint)) == {ids[text] for text in expected.split()}


def test_texts_exclude_added_tokens_and_padding() -> None:
    constraint = create_constraint(SamplingParams(grammar=lark(r"start: /(.|\n)*/")))
    allowed = set(allowed_tokens(constraint))
    assert allowed & tokenizer().added_ids == {END}
    assert max(allowed) < tokenizer().vocab_size
    assert len(allowed) > 3900


def test_stop_token_inside_text_is_excluded_until_grammar_accepts() -> None:
    stop = encode("b")[0]
    params = SamplingParams(grammar=lark("start: /[ab]/ /[ab]/"), stop_token_ids=(stop,))
    constraint = create_constraint(params)
    assert "b" not in allowed_texts(constraint)
    constraint.accept(encode("a"))
    assert "b" not in allowed_texts(constraint)


def test_grammar_names_special_tokens() -> None:
    constraint = create_constraint(SamplingParams(grammar=lark('start: "a" <|user|> <|end|>')))
    constraint.accept(encode("a"))
    assert allowed_texts(constraint) == {"<|user|>"}
    constraint.accept([2])
    assert allowed_texts(constraint) == {"<|end|>"}


THINK = ReasoningBlock(end_ids=(60, 62))


def test_grammar_starts_after_reasoning_block() -> None:
    constraint = create_constraint(SamplingParams(grammar=AB, reasoning=THINK))
    everything = set(allowed_tokens(constraint))
    assert len(everything) == tokenizer().vocab_size - 1, "all but the end of sequence"
    constraint.accept([7, 60, 60, 62])
    assert allowed_texts(constraint) == {"a", "ab"}


@pytest.mark.parametrize(
    ("grammar", "block", "tokens", "after"),
    [
        ("", msgspec.structs.replace(THINK, budget=2), [7, 8], VOCAB_SIZE),
        (AB, msgspec.structs.replace(THINK, budget=2), [7, 8], 2),
        ("", ReasoningBlock(end_ids=(60, 62), start_ids=(70,), budget=0), [70], VOCAB_SIZE),
    ],
)
def test_budget_closes_reasoning_block(
    grammar: str, block: ReasoningBlock, tokens: list[int], after: int
) -> None:
    constraint = create_constraint(SamplingParams(grammar=grammar, reasoning=block))
    constraint.accept(tokens)
    for closing in block.end_ids:
        assert allowed_tokens(constraint) == [closing]
        constraint.accept([closing])
    assert len(allowed_tokens(constraint)) == after


def test_output_may_open_reasoning_block_or_begin_grammar() -> None:
    """The opening sequence "a", "c" begins like the grammar's text, and "x", "y" does not."""
    a, c, x, y, z = (encode(text)[0] for text in "acxyz")
    for start_ids, expected in (((a, c), {"z", "c"}), ((x, y), {"y"})):
        reasoning = ReasoningBlock(end_ids=(62,), start_ids=start_ids)
        params = SamplingParams(grammar=lark('start: "az"'), reasoning=reasoning)
        constraint = create_constraint(params)
        assert allowed_texts(constraint) == {"az", tokenizer().token_text(start_ids[0])}
        constraint.accept(start_ids[:1])
        assert allowed_texts(constraint) == expected
        constraint.accept(start_ids[1:])
        assert len(allowed_tokens(constraint)) > 3900
        constraint.accept([7, 62])
        assert allowed_texts(constraint) == {"az"}
        answered = create_constraint(params)
        answered.accept([a, z])
        assert allowed_texts(answered) == {"<|end|>"}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(grammar=AB, allowed_token_ids=(7,)),
        SamplingParams(grammar=AB, banned_token_ids=tuple(range(VOCAB_SIZE))),
        SamplingParams(
            reasoning=msgspec.structs.replace(THINK, budget=5),
            allowed_token_ids=(END,),
            min_tokens=3,
        ),
    ],
)
def test_row_without_allowed_token_is_a_failure(params: SamplingParams) -> None:
    constraint = create_constraint(params)
    assert len(allowed_tokens(constraint)) >= VOCAB_SIZE, "the mask has no effect"
    assert constraint.failure is not None


def test_tokens_that_do_not_follow_grammar_are_a_failure() -> None:
    constraint = create_constraint(SamplingParams(grammar=AB))
    constraint.accept(encode("xyz"))
    assert "grammar" in (constraint.failure or "")
    assert "\n" not in (constraint.failure or "")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.data())
def test_constraint_depends_only_on_tokens(seed: int, data: st.DataObject) -> None:
    """A constraint that accepts tokens one by one equals one that accepts all of them at once."""
    rng = random.Random(seed)
    reasoning = data.draw(
        st.sampled_from(
            [
                None,
                THINK,
                ReasoningBlock(end_ids=(60, 62), budget=3),
                ReasoningBlock(end_ids=(62,), start_ids=(70,), budget=2),
                ReasoningBlock(end_ids=(62,), start_ids=(70, 72)),
            ]
        )
    )
    params = SamplingParams(
        grammar=data.draw(st.sampled_from([AB, lark("start: /[a-z ]{0,9}/"), json_grammar({})])),
        reasoning=reasoning,
        min_tokens=data.draw(st.integers(0, 4)),
        ignore_eos=data.draw(st.booleans()),
    )
    single = create_constraint(params)
    output: list[int] = []
    for _ in range(12):
        allowed = allowed_tokens(single)
        assert single.failure is None
        replayed = create_constraint(params)
        replayed.accept(output)
        assert allowed_tokens(replayed) == allowed
        marks = [token for token in (60, 62, 70, 72) if token in allowed]
        output.append(rng.choice(marks if marks and rng.random() < 0.5 else allowed))
        single.accept(output[-1:])
        if output[-1] == END:
            break


# --- compiler ---


def test_equal_grammars_are_compiled_once() -> None:
    compiler = GrammarCompiler(lambda: build_grammar_tokenizer(tokenizer(), VOCAB_SIZE))
    grammars = [compiler.submit(AB).result() for _ in range(3)]
    assert grammars[0] is grammars[1] is grammars[2]
    assert (compiler.compiles, compiler.cache_hits) == (1, 2)
    assert compiler.compile_s > 0


def test_memory_of_a_grammar_that_grew_too_large_is_released() -> None:
    compiler = GrammarCompiler(lambda: build_grammar_tokenizer(tokenizer(), VOCAB_SIZE))
    pattern = "((.*[a-m].{20})|(.*[g-q].{21})|(.*[h-z].{22}))qN"
    grammar = compiler.submit(LLMatcher.grammar_from_regex(pattern)).result()
    rng, matcher = random.Random(1), grammar.create_matcher()
    mask = allocate_token_bitmask(1, grammar.tokenizer.native.vocab_size)
    for _ in range(30):
        fill_next_token_bitmask(matcher, mask)
        if matcher.is_error():
            break
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little"))
        matcher.consume_token(int(rng.choice(allowed[allowed < VOCAB_SIZE])))
    assert "too many states" in matcher.get_error()
    grammar.create_unshared_matcher()
    released = weakref.ref(grammar)
    del grammar, matcher
    compiler.submit(AB).result()
    gc.collect()
    assert released() is None


def test_grammar_in_use_outlives_its_cache_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.engine.grammar.compiler.MAX_CACHED_GRAMMARS", 1)
    compiler = GrammarCompiler(lambda: build_grammar_tokenizer(tokenizer(), VOCAB_SIZE))
    grammar = compiler.submit(AB).result()
    compiler.submit(lark('start: "x"')).result()
    assert compiler.find(AB) is grammar
    assert compiler.submit(AB).result() is grammar
    assert compiler.compiles == 2
    compiler.submit(lark('start: "y"')).result()
    del grammar
    with pytest.raises(KeyError):
        compiler.find(AB)


HOSTILE_GRAMMARS = {
    "invalid": "{",
    "unknown rule": lark("start: missing"),
    "unsatisfiable": json_grammar({"type": "integer", "minimum": 2, "maximum": 1}),
    "many alternatives": json_grammar(
        {
            "anyOf": [
                {"type": "object", "properties": {f"p{i}_{j}": True for j in range(32)}}
                for i in range(32)
            ]
        }
    ),
    "huge": lark('start: "' + "x" * 600_000 + '"'),
}


@pytest.mark.parametrize("grammar", HOSTILE_GRAMMARS.values(), ids=HOSTILE_GRAMMARS)
def test_grammar_that_cannot_be_used_is_refused(grammar: str) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError) as error:
            compiler().submit(grammar).result()
        assert "\n" not in str(error.value)


def test_failure_to_load_tokenizer_is_not_cached() -> None:
    attempts: list[int] = []

    def load() -> GrammarTokenizer:
        attempts.append(0)
        if len(attempts) == 1:
            raise OSError("busy")
        return build_grammar_tokenizer(tokenizer(), VOCAB_SIZE)

    compiler = GrammarCompiler(load)
    with pytest.raises(OSError, match="busy"):
        compiler.submit(AB).result()
    assert compiler.submit(AB).result() is compiler.find(AB)


# --- masks ---


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 200), st.integers(0, 2**32 - 1), st.sampled_from(["float32", "bfloat16"]))
def test_expanded_masks_exclude_tokens_without_bit(vocab: int, seed: int, dtype: str) -> None:
    allowed = np.random.default_rng(seed).random((3, vocab)) < 0.5
    words = torch.from_numpy(np.stack([build_mask(row) for row in allowed]))
    logits = torch.zeros(4, vocab, dtype=getattr(torch, dtype))
    expanded = TokenMasks(np.arange(3), words).expand(logits)
    assert expanded.dtype == logits.dtype
    assert ((expanded == 0).numpy() == allowed).all()
    assert (torch.isneginf(expanded).numpy() == ~allowed).all()


# --- core ---


def create_request(name: str, **params: object) -> EngineRequest:
    defaults: dict[str, Any] = {"max_tokens": 120, "seed": int.from_bytes(name.encode()) % 1000}
    return EngineRequest(
        id=name,
        prompt=[*range(10, 30), *name.encode()],
        params=SamplingParams(**(defaults | params)),
    )


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return create_core(BUNDLED_MODEL, max_seqs=8, max_steps_in_flight=1)


def output_text(output: RequestOutput) -> str:
    return tokenizer().decode(output.tokens)


SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "score": {"type": "number", "minimum": -1, "exclusiveMaximum": 1},
            "kind": {"enum": ["a", "bb", None, 3]},
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "required": ["id", "kind", "next"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {"type": "string", "maxLength": 8, "minLength": 2},
        "minItems": 2,
        "maxItems": 5,
    },
    {
        "type": "object",
        "properties": {
            "when": {"type": "string", "format": "date-time"},
            "n": {"multipleOf": 7, "type": "integer"},
        },
        "required": ["when", "n"],
        "maxProperties": 2,
    },
    {"oneOf": [{"const": {"a": [1, 2]}}, {"type": "boolean"}, {"type": "string", "maxLength": 3}]},
]


def test_finished_answers_satisfy_their_schema(core: EngineCore) -> None:
    requests = [
        create_request(f"{number}-{seed}", grammar=json_grammar(schema), seed=seed)
        for number, schema in enumerate(SCHEMAS)
        for seed in range(15)
    ]
    outputs = run_requests(core, requests)
    finishes = {output.finish for output in outputs.values()}
    assert finishes <= {"stop", "length"}
    for name, output in outputs.items():
        if output.finish == "stop":
            document = json.loads(output_text(output))
            assert jsonschema_rs.is_valid(SCHEMAS[int(name.split("-")[0])], document)
    assert sum(output.finish == "stop" for output in outputs.values()) > 20


OPEN_SCHEMAS: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "string"}},
    {"type": "object", "additionalProperties": {"type": "string"}},
    {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "body": {"type": "object", "properties": {"x": {"minLength": 3}}, "required": ["x"]},
            "kind": {"enum": ["plain", "rich"]},
            "count": {"type": "integer"},
            "is_new": {"type": "boolean"},
        },
        "required": ["title", "body", "kind", "count", "is_new"],
        "additionalProperties": False,
    },
]  # fmt: skip


def test_document_is_closed_when_its_limit_comes(core: EngineCore) -> None:
    """Few of these answers, whose strings have no bound, would end within their limit."""
    requests = [
        create_request(
            f"{number}-{seed}", grammar=json_grammar(schema), seed=seed, max_tokens=limit
        )
        for number, schema in enumerate(OPEN_SCHEMAS)
        for seed, limit in enumerate((60, 61, 62, 63, 64, 70, 77, 90))
    ]
    outputs = run_requests(core, requests)
    for name, output in outputs.items():
        document = json.loads(output_text(output))
        assert jsonschema_rs.is_valid(OPEN_SCHEMAS[int(name.split("-")[0])], document)
    cut = [output for output in outputs.values() if output.finish == "length"]
    assert len(cut) > len(outputs) / 4


def test_hostile_grammars_end_only_their_request(core: EngineCore) -> None:
    healthy = [create_request(name) for name in "abcd"]
    hostile = [
        create_request(f"bad{number}", grammar=grammar)
        for number, grammar in enumerate(HOSTILE_GRAMMARS.values())
    ]
    dead_ends_before = core.step().stats.grammar_dead_ends_total
    dead_end = create_request("dead", grammar=AB, allowed_token_ids=(7,))
    # The lexer exceeds its limits after some tokens.
    repeats = lark("start: /((a{1,100}){1,100}){1,100}/")
    late = create_request("late", grammar=repeats, min_tokens=100)
    outputs = run_requests(core, [*hostile, *healthy[:2], dead_end, late, *healthy[2:]])
    for request in hostile:
        output = outputs[request.id]
        assert (output.finish, output.error_code) == ("error", "grammar_failed")
        assert "cannot be compiled" in (output.error or "")
    for output in (outputs["dead"], outputs["late"]):
        assert (output.finish, output.error_code) == ("error", "grammar_dead_end")
    assert "allowed_token_ids" in (outputs["dead"].error or "")
    assert "too many" in (outputs["late"].error or "")
    assert core.step().stats.grammar_dead_ends_total == dead_ends_before + 2
    alone = run_requests(core, healthy)
    assert all(outputs[r.id].tokens == alone[r.id].tokens for r in healthy)


def test_request_is_not_affected_by_grammar_that_another_one_exhausted() -> None:
    """The matchers of one grammar share lexer states, and so do their limits."""
    requests = [
        create_request(
            name,
            grammar=lark("start: /((a{1,100}){1,90}){1,100}/"),
            min_tokens=min_tokens,
            logit_bias={END: 50.0},
        )
        for name, min_tokens in (("a", 100), ("b", 8), ("c", 100), ("d", 8))
    ]
    alone = {
        request.id: run_requests(create_core(BUNDLED_MODEL, max_seqs=8), [request])[request.id]
        for request in requests
    }
    assert [output.finish for output in alone.values()] == ["error", "stop", "error", "stop"]
    one_by_one = create_core(BUNDLED_MODEL, max_seqs=1)
    for order in (requests, requests[::-1], requests[2:]):
        for name, output in run_requests(one_by_one, order).items():
            assert output.finish == alone[name].finish
            if output.finish == "stop":
                assert output.tokens == alone[name].tokens


def test_complete_grammar_ends_request_that_ignores_eos(core: EngineCore) -> None:
    request = create_request("a", grammar=lark('start: "yes" | "no"'), ignore_eos=True)
    output = run_requests(core, [request])["a"]
    assert output.finish == "stop"
    assert output_text(output) in ("yes", "no")


def test_banned_tokens_are_not_sampled(core: EngineCore) -> None:
    request = create_request("a", temperature=0.0, max_tokens=30, ignore_eos=True)
    tokens = run_requests(core, [request])["a"].tokens
    params = msgspec.structs.replace(request.params, banned_token_ids=tuple(tokens[:5]))
    banned = run_requests(core, [msgspec.structs.replace(request, params=params)])["a"].tokens
    assert not set(banned) & set(tokens[:5])


def blocked_core() -> tuple[EngineCore, threading.Event]:
    """Return a core whose grammars are not compiled until an event is set."""
    core, released = create_core(BUNDLED_MODEL, max_seqs=8), threading.Event()
    load = core._grammars._load_tokenizer  # noqa: SLF001 - the test delays the compiler
    core._grammars._load_tokenizer = lambda: (released.wait(), load())[1]  # noqa: SLF001 - same
    return core, released


def test_held_requests_have_no_row_and_time_out_or_abort() -> None:
    core, released = blocked_core()
    outputs = {name: RequestOutput() for name in ("held", "slow", "gone", "free")}
    core.add(create_request("held", grammar=AB))
    core.add(msgspec.structs.replace(create_request("slow", grammar=AB), timeout_s=0.01))
    core.add(create_request("gone", grammar=AB))
    core.add(create_request("free", max_tokens=30, ignore_eos=True))
    core.abort(["gone"])
    while not outputs["free"].finish:
        step = core.step()
        for delta in step.deltas:
            outputs[delta.id].add(delta)
        assert step.stats.running <= 1
    assert (outputs["gone"].finish, outputs["slow"].finish) == ("cancelled", "timeout")
    assert outputs["held"].finish is None
    assert (step.stats.held, step.stats.waiting) == (1, 1)
    assert core.has_work
    released.set()
    while core.has_work:
        for delta in core.step().deltas:
            outputs[delta.id].add(delta)
    assert outputs["held"].finish == "stop"
    assert output_text(outputs["held"]) in ("a", "ab")


def test_siblings_of_held_request_share_its_prompt() -> None:
    core, released = blocked_core()
    request = create_request("0", grammar=AB)
    threading.Timer(0.02, released.set).start()
    siblings = [msgspec.structs.replace(request, id=name, parent_id="0") for name in "123"]
    outputs = run_requests(core, [request, *siblings])
    assert all(outputs[name].cached_tokens == len(request.prompt) - 1 for name in "123")


@pytest.mark.parametrize("reasoning", [None, ReasoningBlock(end_ids=(60, 62), budget=20)])
def test_resumed_output_continues_with_the_same_tokens_and_logprobs(
    core: EngineCore, reasoning: ReasoningBlock | None
) -> None:
    """As after the death of a core, which may happen inside the reasoning or inside a value of the document."""
    grammar = json_grammar(SCHEMAS[1])
    request = create_request("a", grammar=grammar, reasoning=reasoning, logprobs=0)
    complete = run_requests(core, [request])["a"]
    for cut in range(1, len(complete.tokens), 5):
        resumed = msgspec.structs.replace(request, resumed_tokens=complete.tokens[:cut])
        rest = run_requests(core, [resumed])["a"]
        assert rest.tokens == complete.tokens[cut:]
        assert rest.logprobs == complete.logprobs[cut:]
