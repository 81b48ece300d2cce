"""Measure cost routing: quality and cost of a classifier and a cascade over the two bundled models. Prints JSON lines.

    python -m benchmarks.cost_routing [--questions 900] [--labelled FILE]

Both models answer generated questions that are graded exactly. The classifier learns from one set of templates, and is
measured on templates in other words, and on kinds of questions that it has never seen. Always the small model, always
the large one, a random choice and the prompt's length are measured beside it. The cost of a token is the number of
parameters of its model.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from models.corpus.patterns import DATA, read_topic
from numpy.typing import NDArray

from argosy import LLM, SamplingParams
from argosy.gateway import sample_body
from argosy.models import BUNDLED_MODEL, DRAFT_MODEL
from argosy.policy.traffic import ClassifierTarget
from argosy.policy.traffic.classifier_training import (
    LabelledAnswer,
    LabelledPrompt,
    LabelledSet,
    compare_routers,
    measure_target,
    train_classifier,
)

MAX_TOKENS = 48
TARGET = 0.95
"""Quality relative to the large model, for which savings are measured."""
PARAMETERS = {"small": 1_312_896, "large": 8_132_864}
UNSEEN_KINDS = ("plural", "sum", "continent")
"""Kinds that the second classifier does not learn from."""


class Frame(NamedTuple):
    """A kind of question with the ways to ask it: in training, and in the words of the test.

    A kind without any is a group of the probes, whose ways to ask are divided between both sets.
    """

    kind: str
    training: tuple[str, ...]
    test: tuple[str, ...]


FRAMES = (
    Frame(
        "capital",
        (
            "What is the capital of {country}?",
            "Tell me the capital of {country}.",
            "{country}: what is its capital?",
            "Do you know the capital of {country}?",
            "capital of {country}",
        ),
        (
            "Which city is the capital of {country}?",
            "Name the capital of {country}",
            "I need the capital of {country}. Which city is it?",
        ),
    ),
    Frame(
        "continent",
        (
            "Which continent is {country} in?",
            "What continent is {country} on?",
            "Tell me the continent of {country}.",
            "Is {country} in Europe, Asia, Africa or America?",
            "continent of {country}",
        ),
        (
            "On which continent would I find {country}?",
            "Where in the world is {country}?",
            "Name the continent that {country} belongs to.",
        ),
    ),
    Frame(
        "opposite",
        (
            "What is the opposite of {one}?",
            "Tell me the opposite of {one}.",
            "opposite of {one}",
            "Which word means the opposite of {one}?",
            "Say the opposite of {one}",
        ),
        (
            "What is the antonym of {one}?",
            "Give me the opposite of {one}",
            "I am looking for the opposite of the word {one}.",
        ),
    ),
    Frame(
        "plural",
        (
            "What is the plural of {one}?",
            "Plural of {one}",
            "Tell me the plural of {one}.",
            "One {one}, two what?",
            "Which word is the plural of {one}?",
        ),
        (
            "How do you write more than one {one}?",
            "Give me the plural of {one}, please.",
            "{one} in the plural",
        ),
    ),
    Frame(
        "past",
        (
            "What is the past tense of {now}?",
            "Past tense of {now}",
            "Tell me the past tense of {now}.",
            "Today I {now}. What is it for yesterday?",
            "Which word is the past tense of {now}?",
        ),
        (
            "Give me the past form of {now}",
            "How do you say {now} in the past?",
            "{now} in the past tense, please",
        ),
    ),
    Frame(
        "sum",
        (
            "What is {a} + {b}?",
            "Calculate {a} + {b}",
            "{a}+{b}",
            "Tell me {a} plus {b}.",
            "Compute the sum {a} + {b}.",
        ),
        (
            "How much is {a} plus {b}?",
            "Can you add {a} and {b} for me?",
            "{a} + {b} =",
        ),
    ),
    Frame(
        "lookup",
        (
            "{pairs}\n\nWhat is the {key}?",
            "{pairs}\n\nTell me {key}",
            "{pairs}\n\nGive me the {key}.",
            "My list:\n{pairs}\n\nWhat is {key}?",
            "What is the {key}?\n\n{pairs}",
        ),
        (
            "Here is a list.\n{pairs}\nGive me the {key} from it.",
            "{pairs}\n\n{key}?",
            "Which value has {key} in this list?\n{pairs}",
        ),
    ),
    Frame("greetings", (), ()),
    Frame("argosy", (), ()),
)


class Question(NamedTuple):
    """A question, and whether an answer is right."""

    kind: str
    frame: str
    text: str
    is_right: Callable[[str], bool]


def has_word(answer: str) -> Callable[[str], bool]:
    """Return a grader for texts with this answer, but for case and what surrounds it."""
    pattern = re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)", re.IGNORECASE)
    return lambda text: pattern.search(text) is not None


def has_patterns(wanted: Sequence[str]) -> Callable[[str], bool]:
    """Return a grader for texts that match all patterns."""
    return lambda text: all(re.search(pattern, text, re.DOTALL) for pattern in wanted)


def draw_pairs(rng: Random) -> dict[str, str]:
    """Return names with values, as in the text that the models were trained on, but of other words."""
    words = [row["one"] for row in read_topic(DATA / "plurals.txt").rows]
    values = [row["capital"] for row in read_topic(DATA / "capitals.txt").rows]
    names = rng.sample(words, rng.randint(2, 7))
    return {name: rng.choice((rng.choice(values), str(rng.randint(10, 9999)))) for name in names}


def generate_questions(seed: int, count: int, *, is_test: bool) -> Iterator[Question]:
    """Yield questions of all kinds in turn."""
    rng = Random(seed)
    topics = {
        name: read_topic(DATA / f"{name}.txt").rows
        for name in ("capitals", "words", "plurals", "verbs")
    }
    probes: defaultdict[tuple[str, bool], list[tuple[str, list[str]]]] = defaultdict(list)
    for entry in json.loads((DATA / "probes.json").read_text(encoding="utf-8")):
        for index, asked in enumerate(entry["ask"]):
            if not entry.get("before"):
                probes[entry["group"], index % 2 == 1].append((asked, entry["want"]))
    sources = {
        "capital": ("capitals", "capital"),
        "continent": ("capitals", "continent"),
        "opposite": ("words", "two"),
        "plural": ("plurals", "many"),
        "past": ("verbs", "past"),
    }
    for number in range(count):
        frame = FRAMES[number % len(FRAMES)]
        if not frame.training:
            asked, wanted = rng.choice(probes[frame.kind, is_test])
            yield Question(frame.kind, asked, asked, has_patterns(wanted))
            continue
        text = rng.choice(frame.test if is_test else frame.training)
        slots: dict[str, Any] = {}
        if frame.kind in sources:
            topic, answer = sources[frame.kind]
            slots = rng.choice(topics[topic])
            grade = has_word(slots[answer])
        elif frame.kind == "sum":
            top = rng.choice((9, 9, 20, 99))
            slots = {"a": rng.randint(0, top), "b": rng.randint(0, top)}
            grade = has_word(str(slots["a"] + slots["b"]))
        else:
            pairs = draw_pairs(rng)
            key = rng.choice(list(pairs))
            listed = "\n".join(f"{name}: {value}" for name, value in pairs.items())
            slots = {"pairs": listed, "key": key}
            grade = has_word(pairs[key])
        yield Question(frame.kind, text, text.format(**slots), grade)


def answer_all(folder: Path, size: str, questions: Sequence[Question]) -> list[dict[str, float]]:
    """Return quality, cost and log-probabilities of a model's answer to each question."""
    llm = LLM(folder, threads=1, progress="off")
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=0)
    conversations = [[{"role": "user", "content": question.text}] for question in questions]
    rows = []
    for question, output in zip(
        questions, llm.chat(conversations, sampling, use_tqdm=False), strict=True
    ):
        choice = output.outputs[0]
        logprobs = [entry.logprob for entry in choice.logprobs or ()]
        tokens = len(output.prompt_token_ids) + len(choice.token_ids)
        rows.append(
            {
                "quality": float(choice.finish_reason == "stop" and question.is_right(choice.text)),
                "cost": tokens * PARAMETERS[size] / PARAMETERS["small"],
                "mean_logprob": sum(logprobs) / len(logprobs),
                "min_logprob": min(logprobs),
            }
        )
    llm.close()
    return rows


def label(count: int) -> Iterator[dict[str, Any]]:
    """Yield both models' results for questions of both sets, as `argosy routing train` reads them."""
    for name, seed in (("training", 1), ("test", 2)):
        questions = list(generate_questions(seed, count, is_test=name == "test"))
        small = answer_all(DRAFT_MODEL, "small", questions)
        large = answer_all(BUNDLED_MODEL, "large", questions)
        for question, *results in zip(questions, small, large, strict=True):
            yield {
                "set": name,
                "group": question.frame,
                "kind": question.kind,
                "messages": [{"role": "user", "content": question.text}],
                "small": results[0],
                "large": results[1],
            }


def read_prompts(rows: Sequence[dict[str, Any]]) -> list[LabelledPrompt]:
    """Return labelled rows as the training reads them."""
    prompts = []
    for row in rows:
        sample = sample_body(json.dumps({"messages": row["messages"]}).encode())
        if sample is None:
            raise ValueError(f"no text in {row}")
        small, large = (
            LabelledAnswer(quality=row[size]["quality"], cost=row[size]["cost"])
            for size in ("small", "large")
        )
        prompts.append(LabelledPrompt(sample, row["group"], small, large))
    return prompts


class Cascade:
    """The small model's answers, of which the large model replaces those with a low log-probability."""

    def __init__(self, rows: Sequence[dict[str, Any]], key: str) -> None:
        self._labelled = LabelledSet(read_prompts(rows))
        self._doubts = -np.array([row["small"][key] for row in rows])

    def evaluate(
        self, threshold: float, chosen: NDArray[np.int64] | None = None
    ) -> tuple[float, float]:
        """Return quality and cost relative to the large model alone. The small model always answers first."""
        labelled, is_large = self._labelled, self._doubts >= threshold
        quality = np.where(is_large, labelled.large[:, 0], labelled.small[:, 0])
        cost = labelled.small[:, 1] + np.where(is_large, labelled.large[:, 1], 0.0)
        large = labelled.large
        if chosen is not None:
            quality, cost, large = quality[chosen], cost[chosen], large[chosen]
        return float(quality.mean() / large[:, 0].mean()), float(cost.mean() / large[:, 1].mean())

    def list_points(self) -> list[tuple[float, float, float]]:
        """Return threshold, quality and cost, as more and more answers are replaced."""
        thresholds = np.quantile(self._doubts, np.linspace(1.0, 0.0, 101))
        return [(float(each), *self.evaluate(float(each))) for each in thresholds]


def interval(values: Sequence[float]) -> list[float]:
    """Return the bounds of 95 % of the values."""
    return [round(float(each), 4) for each in np.quantile(values, (0.025, 0.975))]


def measure_cascade(
    training: Sequence[dict[str, Any]], test: Sequence[dict[str, Any]], key: str
) -> dict[str, Any]:
    """Return the result of a cascade on the test set, with the threshold of the training set."""
    threshold = next(
        threshold
        for threshold, quality, _ in Cascade(training, key).list_points()
        if quality >= TARGET
    )
    cascade = Cascade(test, key)
    quality, cost = cascade.evaluate(threshold)
    generator = np.random.Generator(np.random.PCG64(1))
    resampled = [
        cascade.evaluate(threshold, generator.integers(0, len(test), len(test)))
        for _ in range(1000)
    ]
    points = cascade.list_points()
    return {
        "router": f"cascade on {key}",
        "saving_at_95": round(1.0 - next(cost for _, each, cost in points if each >= TARGET), 4),
        "chosen_quality": round(quality, 4),
        "chosen_quality_95": interval([each for each, _ in resampled]),
        "chosen_saving": round(1.0 - cost, 4),
        "chosen_saving_95": interval([1.0 - each for _, each in resampled]),
        "curve": [[round(each, 4) for each in point[1:]] for point in points[::10]],
    }


def measure_classifier(
    training: Sequence[dict[str, Any]], test: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the results on the test set of a classifier that knows the training set, and of its baselines."""
    classifier = train_classifier(
        read_prompts(training), small=("small", ""), large=("large", ""), data_digest=""
    )
    labelled = LabelledSet(read_prompts(test))
    chosen = measure_target(classifier, labelled, ClassifierTarget(quality_share=TARGET))
    for result in compare_routers(classifier, labelled, TARGET):
        row: dict[str, Any] = {
            "router": result.router,
            "auc": round(result.auc, 3),
            "saving_at_95": round(result.saving, 4),
        }
        if result.router == "classifier":
            row |= {
                "chosen_quality": chosen.quality_share[1],
                "chosen_quality_95": chosen.quality_share[::2],
                "chosen_saving": chosen.saving[1],
                "chosen_saving_95": chosen.saving[::2],
            }
        curve = [
            [round(each.quality_share, 4), round(each.cost_share, 4)] for each in result.curve[::10]
        ]
        yield row | {"curve": curve}


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean quality and cost of both models."""
    return {
        f"{size}_{name}": round(sum(row[size][name] for row in rows) / len(rows), 4)
        for size in ("small", "large")
        for name in ("quality", "cost")
    }


def measure(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the results: by kind of question, and by router for templates and for kinds that it has not seen."""
    sets = {name: [row for row in rows if row["set"] == name] for name in ("training", "test")}
    for name, group in sets.items():
        yield {"set": name, "questions": len(group), **summarize(group)}
        for kind in sorted({row["kind"] for row in group}):
            yield {
                "set": name,
                "kind": kind,
                **summarize([row for row in group if row["kind"] == kind]),
            }
    others = [row for row in sets["training"] if row["kind"] not in UNSEEN_KINDS]
    unseen = [row for row in sets["test"] if row["kind"] in UNSEEN_KINDS]
    for name, training, test in (
        ("other templates", sets["training"], sets["test"]),
        ("other kinds and templates", others, unseen),
    ):
        quality = summarize(test)
        always_small = {
            "router": "always small",
            "quality": round(quality["small_quality"] / quality["large_quality"], 4),
            "cost": round(quality["small_cost"] / quality["large_cost"], 4),
        }
        for row in (
            always_small,
            {"router": "always large", "quality": 1.0, "cost": 1.0},
            *measure_classifier(training, test),
            *(measure_cascade(training, test, key) for key in ("mean_logprob", "min_logprob")),
        ):
            yield {"measured_on": name, **row}


def main() -> int:
    """Label the questions, or read their labels, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=900, help="questions of each set")
    parser.add_argument(
        "--labelled", type=Path, help="file with the models' results; made if it does not exist"
    )
    arguments = parser.parse_args()
    file: Path | None = arguments.labelled
    if file is not None and file.exists():
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    else:
        rows = list(label(arguments.questions))
        if file is not None:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for row in measure(rows):
        sys.stdout.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
