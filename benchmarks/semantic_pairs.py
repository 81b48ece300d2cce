"""Generate labelled pairs of questions for the semantic cache, by two generators that share no frame and no vocabulary.

    python -m benchmarks.semantic_pairs training > training.jsonl
    python -m benchmarks.semantic_pairs holdout > holdout.jsonl
    argosy cache evaluate --pairs holdout.jsonl --embedding-model minilm

The guard was written with the training pairs in view. The hold-out is not blind: the guard `no_substitution` was
widened once after a first look at it, and both come from the same hand. Take pairs of your own traffic to turn a rule
on. A line has the questions `a` and `b`, whether they have the `same` answer, and the `kind` of their difference.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator

Pair = tuple[str, str, bool, str]

TRAINING_EQUAL = (
    ("How do I reset my {x}?", "What are the steps to reset my {x}?", "How can I reset the {x}"),
    ("How do I cancel my {x}?", "What is the way to cancel the {x}?", "Please explain how to cancel my {x}"),
    ("What does the {x} cost?", "Tell me the price of the {x}", "How much is the {x}?"),
    ("Where can I find my {x}?", "Where do I see the {x}?", "In which place is my {x}?"),
    ("How do I delete the {x}?", "How can I remove the {x}?", "I want to erase the {x}, how?"),
    ("What is the purpose of the {x}?", "What is the {x} for?", "Why is there a {x}?"),
)  # fmt: skip
TRAINING_WORDS = ("account", "subscription", "invoice", "profile", "order", "password")
TRAINING_UNEQUAL = (
    ("How do I pay for {n} users?", "How do I pay for {m} users?", "number"),
    ("Does the plan include {n} GB?", "Does the plan include {n} MB?", "unit"),
    ("Can I use the {x} with tax?", "Can I use the {x} without tax?", "negation"),
    ("Is the {x} available?", "Is the {x} not available?", "negation"),
    ("When was the {x} sent by Anna?", "When was the {x} sent by Martin?", "name"),
    ("Is the {x} due in March?", "Is the {x} due in June?", "date"),
    ("How do I enable the {x}?", "How do I disable the {x}?", "antonym"),
    ("Did the {x} replace the plan?", "Did the plan replace the {x}?", "swap"),
    ("Can I share the {x}?", "Can I share the {x} after I leave?", "condition"),
    ("How do I move the {x} to Berlin?", "How do I move the {x} from Berlin?", "direction"),
    ("Must I keep the {x}?", "May I keep the {x}?", "duty"),
    ("How is the {x} printed?", "When is the {x} printed?", "question"),
)

HOLDOUT_EQUAL = (
    ("Which city is the capital of {c}?", "What's {c}'s capital city?", "Name the capital of {c}.", "capital of {c}"),
    ("At what temperature does {s} melt?", "What is the melting point of {s}?", "How hot must {s} get to melt?"),
    ("Could you summarise how {t} works?", "Explain the way {t} works.", "How does {t} work?"),
    ("Is {f} good for the heart?", "Does eating {f} benefit the heart?", "Is {f} heart-healthy?"),
    ("Who invented the {i}?", "Who was the inventor of the {i}?", "Which person came up with the {i}?"),
    ("How long should {f} be boiled?", "For how long do I boil {f}?", "What's the boiling time of {f}?"),
    ("I'd like to learn {l}. Where do I begin?", "Where should I start learning {l}?",
     "How do beginners start with {l}?"),
    ("What languages are spoken in {c}?", "Which languages do people in {c} speak?", "Tell me the languages of {c}"),
    ("What causes {t} to fail?", "Why does {t} fail?", "For what reasons can {t} break down?"),
    ("Are visitors allowed to photograph the {i}?", "May tourists take pictures of the {i}?",
     "Is it permitted to photograph the {i}?"),
    ("Give me a definition of {t}.", "What is {t}?", "Define {t}", "What does {t} mean?"),
    ("How far is the moon from {c}?", "What is the distance between {c} and the moon?",
     "distance of the moon from {c}"),
)  # fmt: skip
HOLDOUT_UNEQUAL = (
    ("How long should {f} be boiled at {n} degrees?", "How long should {f} be boiled at {m} degrees?", "number"),
    ("Name {n} rivers of {c}.", "Name {m} rivers of {c}.", "number"),
    ("Convert {n} ounces of {s} to grams", "Convert {n} grams of {s} to ounces", "unit"),
    ("How many litres of {f} soup do {n} guests eat?", "How many gallons of {f} soup do {n} guests eat?", "unit"),
    ("Who ruled {c} in 1850?", "Who ruled {d} in 1850?", "name"),
    ("What did Kepler write about {t}?", "What did Galileo write about {t}?", "name"),
    ("Which countries border {c}?", "Which countries don't border {c}?", "negation"),
    ("Can {s} be recycled?", "Can {s} hardly be recycled?", "negation"),
    ("Why is {f} healthy?", "Why is {f} unhealthy?", "antonym"),
    ("Does {t} raise blood pressure?", "Does {t} lower blood pressure?", "antonym"),
    ("What are the advantages of {t}?", "What are the drawbacks of {t}?", "antonym"),
    ("Is {s} denser than water?", "Is water denser than {s}?", "swap"),
    ("Did {c} invade {d}?", "Did {d} invade {c}?", "swap"),
    ("Was {c} conquered by {d}?", "Did {c} conquer {d}?", "swap"),
    ("Who taught the inventor of the {i}?", "Whom did the inventor of the {i} teach?", "swap"),
    ("Is {f} safe?", "Is {f} safe for toddlers?", "condition"),
    ("Can I carry {s} on a plane?", "Can I carry {s} on a plane if it is liquid?", "condition"),
    ("Is raw {f} edible?", "Is {f} edible?", "condition"),
    ("How do I travel to {c} by train?", "How do I travel from {c} by train?", "direction"),
    ("Do I put {f} in before the salt?", "Do I put {f} in after the salt?", "direction"),
    ("What is the weather of {c} in spring?", "What is the weather of {c} in autumn?", "date"),
    ("What happened in {c} yesterday?", "What happened in {c} today?", "date"),
    ("Must tourists register in {c}?", "Can tourists register in {c}?", "duty"),
    ("Do all people in {c} speak {l}?", "Do some people in {c} speak {l}?", "quantity"),
    ("How was the {i} invented?", "Where was the {i} invented?", "question"),
    ("How does {t} work?", "Does {t} work?", "question"),
    ("How is {f} made?", "What is {f} made of?", "question"),
    ("Write a poem about {s}.", "Write a sentence about {s}.", "substitution"),
    ("Translate {t} into {l}.", "Translate {t} from {l}.", "direction"),
    ("Is {c} larger than {d}?", "Is {c} as large as {d}?", "substitution"),
)  # fmt: skip
HOLDOUT_WORDS = {
    "c": ("Norway", "Kenya", "Peru", "Japan", "Hungary"),
    "d": ("Chile", "Egypt", "Latvia", "Nepal", "Ghana"),
    "s": ("copper", "paraffin", "glycerol", "sulphur", "chalk"),
    "t": ("osmosis", "a heat pump", "inflation", "meditation", "sonar"),
    "f": ("spinach", "barley", "salmon", "lentils", "quinoa"),
    "i": ("telescope", "printing press", "zipper", "barometer", "Eiffel Tower"),
    "l": ("Welsh", "Finnish", "Korean", "Arabic", "Swahili"),
    "n": ("3", "12", "40", "five", "900"),
    "m": ("4", "20", "14", "six", "90"),
}


def generate_training() -> Iterator[Pair]:
    """Yield pairs about accounts and orders."""
    for frames, word in itertools.product(TRAINING_EQUAL, TRAINING_WORDS):
        for a, b in itertools.combinations(frames, 2):
            yield a.format(x=word), b.format(x=word), True, "paraphrase"
    for (a, b, kind), word in itertools.product(TRAINING_UNEQUAL, TRAINING_WORDS):
        fields = {"x": word, "n": "3", "m": "5"}
        yield a.format(**fields), b.format(**fields), False, kind


def generate_holdout() -> Iterator[Pair]:
    """Yield pairs about countries, substances, food, inventions and languages."""
    for index in range(5):
        fields = {name: words[index] for name, words in HOLDOUT_WORDS.items()}
        for frames in HOLDOUT_EQUAL:
            for a, b in itertools.combinations(frames, 2):
                yield a.format(**fields), b.format(**fields), True, "paraphrase"
        for a, b, kind in HOLDOUT_UNEQUAL:
            yield a.format(**fields), b.format(**fields), False, kind


GENERATORS = {"training": generate_training, "holdout": generate_holdout}


def main() -> None:
    """Print the pairs of a generator as JSON lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("generator", choices=GENERATORS)
    for a, b, same, kind in GENERATORS[parser.parse_args().generator]():
        print(json.dumps({"a": a, "b": b, "same": same, "kind": kind}))


if __name__ == "__main__":
    main()
