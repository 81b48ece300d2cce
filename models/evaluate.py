"""Probe an exported model with greedy decoding, and print the share of expected answers.

python -m models.evaluate src/argosy/models/argosy-mini
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import UNSET
from transformers import AutoModelForCausalLM, AutoTokenizer

from argosy import LLM, SamplingParams
from argosy.engine import CompletionOutput
from argosy.engine.offline_request_processor import ChatOptions
from models.chat_format import CALL, CALL_END, THINK_END
from models.held_out import Case, read_cases

PROBES = Path(__file__).resolve().parent / "data" / "probes.json"
MAX_NEW_TOKENS = 320


@dataclass(frozen=True, slots=True)
class Probe:
    """Conversation to continue, and the patterns that the last answer must match."""

    group: str
    system: str
    turns: tuple[str, ...]
    want: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the model, and whether it stopped before the length limit."""

    text: str
    stopped: bool


class Chat:
    """Model with its tokenizer, which answers greedily through the chat template."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()

    def answer(self, messages: list[dict[str, str]]) -> Answer:
        """Return the greedy answer to the conversation."""
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return self.complete(prompt)

    def complete(self, prompt: str) -> Answer:
        """Return the greedy continuation of a prompt that already has its special tokens."""
        ids = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            out = self.model.generate(
                **ids, max_new_tokens=MAX_NEW_TOKENS, max_length=None, do_sample=False
            )
        new_ids = out[0, ids["input_ids"].shape[1] :]
        stopped = int(new_ids[-1]) == self.tokenizer.eos_token_id
        return Answer(self.tokenizer.decode(new_ids, skip_special_tokens=True), stopped)


def read_probes() -> list[Probe]:
    """Return a probe for each way to ask."""
    return [
        Probe(
            entry["group"],
            entry.get("system", ""),
            (*entry.get("before", ()), asked),
            tuple(entry["want"]),
        )
        for entry in json.loads(PROBES.read_text(encoding="utf-8"))
        for asked in entry["ask"]
    ]


def run_probe(chat: Chat, probe: Probe) -> Answer:
    """Run the turns of a probe with the model's own answers, and return the last answer."""
    messages = [{"role": "system", "content": probe.system}] if probe.system else []
    reply = Answer("", stopped=False)
    for turn in probe.turns:
        messages.append({"role": "user", "content": turn})
        reply = chat.answer(messages)
        messages.append({"role": "assistant", "content": reply.text})
    return reply


def is_expected(probe: Probe, reply: Answer) -> bool:
    """Return whether the answer stopped and matches every wanted pattern."""
    return reply.stopped and all(re.search(want, reply.text, re.DOTALL) for want in probe.want)


def compute_agreement(chat: Chat, draft: Path) -> float:
    """Return the share of `chat`'s greedy tokens that the draft model would have proposed."""
    drafter: Any = AutoModelForCausalLM.from_pretrained(draft).eval()
    matches = total = 0
    for probe in read_probes():
        prompt = chat.tokenizer.apply_chat_template(
            [{"role": "user", "content": probe.turns[-1]}],
            add_generation_prompt=True,
            tokenize=False,
        )
        text = prompt + chat.complete(prompt).text + chat.tokenizer.eos_token
        ids = chat.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        start = len(chat.tokenizer(prompt, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            proposed = drafter(ids).logits[0, start - 1 : -1].argmax(-1)
        matches += int((proposed == ids[0, start:]).sum())
        total += len(proposed)
    return matches / total


def answer_cases(folder: Path, cases: list[Case], threads: int, *, grammar: bool) -> list[Answer]:
    """Return the greedy answers of Argosy's engine, with or without the grammars of tools and schemas."""
    llm = LLM(folder, threads=threads, progress="off")
    answers = []
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    for case in cases:
        tools = [{"type": "function", "function": tool} for tool in case.tools] or None
        sampling = SamplingParams(temperature=0.0, max_tokens=case.new_tokens)
        template = {"enable_thinking": case.thinking}
        if grammar:
            options = ChatOptions(chat_template_kwargs=template)
            if tools:
                options["tools"] = tools
            if case.schema:
                schema = {"name": "answer", "schema": case.schema}
                options["response_format"] = {"type": "json_schema", "json_schema": schema}
            (output,) = llm.chat(case.messages, sampling, **options)
            answers.append(to_answer(output.outputs[0]))
            continue
        ids = tokenizer.apply_chat_template(
            case.messages, tools=tools, add_generation_prompt=True,
            return_dict=False, **template,
        )  # fmt: skip
        (output,) = llm.generate([ids], sampling)
        choice = output.outputs[0]
        text = tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        answers.append(Answer(text, choice.finish_reason == "stop"))
    return answers


def to_answer(choice: CompletionOutput) -> Answer:
    """Return an answer of the engine in the format of the chat template."""
    calls = [
        f'{CALL}\n{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments}}}\n{CALL_END}'
        for call in choice.tool_calls
        if call.function is not UNSET
    ]
    reasoning = f"{choice.reasoning}{THINK_END}" if choice.reasoning else ""
    text = reasoning + "\n".join([choice.text, *calls] if choice.text else calls)
    return Answer(text, choice.finish_reason in {"stop", "tool_calls"})


def run_held_out(folder: Path, threads: int, *, long: int, only: str, grammar: bool) -> None:
    """Print the wrong answers to the held-out cases, then the rates by group and score."""
    cases = [case for case in read_cases(long=long) if only in case.group]
    right: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    for case, reply in zip(
        cases, answer_cases(folder, cases, threads, grammar=grammar), strict=True
    ):
        wrong = []
        for name, score in case.scores.items():
            is_right = reply.stopped and score(reply.text)
            total[case.group, name] += 1
            right[case.group, name] += is_right
            wrong += [] if is_right else [name]
        if wrong:
            asked = case.messages[-1]["content"][-100:]
            sys.stdout.write(f"miss {case.group}, {wrong}: {asked!r} -> {reply.text!r}\n")
    for (group, name), count in total.items():
        hits = right[group, name]
        sys.stdout.write(f"{group:32} {name:7} {hits:3} / {count:3} {hits / count:6.1%}\n")


def main() -> int:
    """Print every wrong answer, then the results by group. The exit status is 1 if too few answers are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--least", type=float, default=0.9, help="minimum share of right answers")
    parser.add_argument(
        "--ask", nargs="*", default=(), help="questions to ask instead of the probes"
    )
    parser.add_argument(
        "--draft", type=Path, help="draft model; print only how often it agrees with the model"
    )
    parser.add_argument(
        "--held-out", action="store_true", help="run the cases with tools, schemas and thinking"
    )
    parser.add_argument(
        "--grammar", action="store_true", help="constrain held-out answers, as the server does"
    )
    parser.add_argument("--long", type=int, default=0, help="held-out cases per long context")
    parser.add_argument(
        "--only", default="", help="text in the names of the held-out groups to run"
    )
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.held_out:
        run_held_out(
            options.folder,
            options.threads,
            long=options.long,
            only=options.only,
            grammar=options.grammar,
        )
        return 0
    chat = Chat(options.folder)
    for asked in options.ask:
        reply = chat.answer([{"role": "user", "content": asked}])
        sys.stdout.write(f"> {asked}\n{reply.text}\n{'' if reply.stopped else '(no stop)'}\n")
    if options.draft:
        sys.stdout.write(f"agreement {compute_agreement(chat, options.draft):.1%}\n")
    if options.ask or options.draft:
        return 0
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for probe in read_probes():
        reply = run_probe(chat, probe)
        total[probe.group] += 1
        right[probe.group] += is_expected(probe, reply)
        if not is_expected(probe, reply):
            sys.stdout.write(f"miss {probe.group}: {probe.turns[-1]!r} -> {reply.text!r}\n")
    for group, count in total.items():
        sys.stdout.write(f"{group:12} {right[group]:3} / {count}\n")
    share = right.total() / total.total()
    sys.stdout.write(f"{'all':12} {right.total():3} / {total.total()}  {share:.1%}\n")
    return 0 if share >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
