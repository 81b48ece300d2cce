"""Generate labelled pairs of questions for the semantic cache, by three generators without a common frame or word.

    python -m benchmarks.semantic_pairs training > training.jsonl
    python -m benchmarks.semantic_pairs blind > blind.jsonl
    argosy cache evaluate --pairs blind.jsonl --embedding-model minilm

The guard was written with the training pairs in view, and `no_substitution` was widened once after a first look at the
hold-out. The blind pairs were written after that, without a look at the words of the guard. They were evaluated once,
at the lowest threshold with the fewest wrong answers to training pairs, and nothing was changed afterwards. Take
pairs of your own traffic to turn a rule on. A line has the questions `a` and `b`, whether they have the `same` answer,
and the `kind` of their difference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
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

BLIND_PAIRS = 12
"""Pairs with the same answer, and as many with another one, of each intent."""
BLIND_OPENINGS = ("", "", "", "Hi! ", "Quick question: ", "Sorry to bother you. ", "Hello team, ")
BLIND_CLOSINGS = ("", "", "", " Thanks!", " Thank you.", " Cheers")
BLIND_INTENTS: tuple[tuple[tuple[str, ...], dict[str, tuple[str, ...]]], ...] = (
    (("How often does a {plant} need {care}{when}?", "At what intervals should I give my {plant} {care}{when}?",
      "I have a {plant}. How frequently do I provide {care}{when}?"),
     {"plant": ("fern", "cactus", "rose bush"), "care": ("water", "fertiliser"), "when": ("", " in winter",
      " in July")}),
    (("My car {symptom} {moment}. What could be wrong?", "What is the likely fault if a car {symptom} {moment}?",
      "{moment}, the car {symptom}. Which defect causes that?"),
     {"symptom": ("squeals", "shakes", "stalls"), "moment": ("when braking", "when accelerating", "while idling")}),
    (("How much {food} should a {weight} {pet} eat per {period}?",
      "What amount of {food} per {period} suits a {weight} {pet}?",
      "Feeding advice wanted: how much {food} for a {weight} {pet}, per {period}?"),
     {"food": ("dry food", "wet food"), "weight": ("4 kg", "14 kg", "4 lb"), "pet": ("cat", "dog"),
      "period": ("day", "meal")}),
    (("In a spreadsheet, how do I {act} the {place} column?",
      "Which shortcut lets me {act} the {place} column of a sheet?",
      "Spreadsheet help: I need to {act} the {place} column."),
     {"act": ("hide", "unhide", "freeze", "sum"), "place": ("first", "last", "selected")}),
    (("Can my landlord {act} {notice} notice?", "Is a landlord entitled to {act} {notice} notice?",
      "Does the law let the owner of my flat {act} {notice} notice?"),
     {"act": ("raise the rent", "lower the rent", "enter the flat"), "notice": ("with", "without", "after a month's")}),
    (("How many players may {team} {act} in a {game} match?",
      "What is the number of players that {team} can {act} during a {game} match?",
      "In {game}, how many players is {team} permitted to {act}?"),
     {"team": ("a junior team", "a senior team", "a team of three"), "act": ("substitute", "field"),
      "game": ("handball", "hockey", "volleyball")}),
    (("Is it safe to take {drug} {relation} {other}?", "May one swallow {drug} {relation} {other} without danger?",
      "Are there risks when {drug} is taken {relation} {other}?"),
     {"drug": ("ibuprofen", "paracetamol"), "relation": ("with", "instead of", "shortly after"),
      "other": ("aspirin", "wine")}),
    (("Which is {more}, a {one} or a {two}?", "Between a {one} and a {two}, which one is {more}?",
      "Is a {two} or a {one} {more}?"),
     {"more": ("heavier", "lighter", "quieter", "more durable"), "one": ("violin", "banjo"), "two": ("cello",
      "ukulele")}),
    (("How do I undo {what} in git?", "What is the git command that reverts {what}?",
      "git: I made a mistake, how to take back {what}?"),
     {"what": ("a merge", "a rebase", "the last commit", "the last two commits", "a pushed commit", "a local commit")}),
    (("Who pays for {item} if an employee {event}?", "If an employee {event}, who bears the cost of {item}?",
      "When a worker {event}, is it the firm or the worker that covers {item}?"),
     {"item": ("the laptop", "training", "the flight home"), "event": ("resigns", "is dismissed", "falls ill",
      "does not resign")}),
    (("Do I need {thing} to hike {route}{season}?", "Is {thing} required for the hike {route}{season}?",
      "Going to walk {route}{season}. Must I carry {thing}?"),
     {"thing": ("a permit", "crampons"), "route": ("up Ben Nevis", "down Ben Nevis", "around Ben Nevis", "up Snowdon"),
      "season": ("", " at night", " on weekdays")}),
    (("What happens if I {act} {count} doses of the vaccine?",
      "What are the consequences should I {act} {count} doses of the vaccine?",
      "Suppose I {act} {count} doses of the vaccine: what then?"),
     {"act": ("skip", "get", "delay"), "count": ("two", "three", "all", "some")}),
    (("How long can {item} stay in the {place}?", "For what time does {item} keep in the {place}?",
      "{item} in the {place}: how long is it good for?"),
     {"item": ("opened milk", "unopened milk", "cooked rice", "raw chicken"), "place": ("fridge", "freezer")}),
    (("Explain {topic} to {whom} in {length}.", "In {length}, please explain {topic} to {whom}.",
      "I want an explanation of {topic} for {whom}, {length} long."),
     {"topic": ("black holes", "supply and demand"), "whom": ("a child", "an expert"), "length": ("two sentences",
      "two paragraphs", "ten sentences")}),
    (("Should I {act} my bike chain {order} cleaning it?", "Is it right to {act} a bike chain {order} it is cleaned?",
      "Bike chain: do you {act} it {order} cleaning?"),
     {"act": ("oil", "degrease", "shorten"), "order": ("before", "after")}),
    (("Where can I {act} my {doc} in {city}?", "Which office in {city} lets me {act} my {doc}?",
      "I'm in {city} and want to {act} my {doc}. Where do I go?"),
     {"act": ("renew", "return", "replace"), "doc": ("passport", "driving licence", "parking permit"),
      "city": ("Lyon", "Porto", "Graz")}),
    (("What did {who} say about {whom}?", "Can you recall what {who} said about {whom}?",
      "What was the opinion of {who} on {whom}?"),
     {"who": ("Darwin", "Huxley", "Lamarck"), "whom": ("Wallace", "Owen", "his critics")}),
    (("Write a {tone} {kind} to {whom} about a delayed delivery.",
      "Please draft a {tone} {kind} on a late delivery to {whom}.",
      "I need a {tone} {kind} for {whom} since the delivery is delayed."),
     {"tone": ("polite", "firm", "funny"), "kind": ("letter", "text message"), "whom": ("a supplier", "a customer")}),
    (("What's the {limit} {measure} for {vehicle} on {road}?",
      "On {road}, what {limit} {measure} applies to {vehicle}?",
      "{vehicle} on {road}: which {limit} {measure} holds?"),
     {"limit": ("maximum", "minimum"), "measure": ("speed", "distance to others"), "vehicle": ("lorries", "motorbikes"),
      "road": ("motorways", "country roads")}),
    (("Are {who} exempt from {tax}{cond}?", "Do {who} have an exemption from {tax}{cond}?",
      "Is it true that {who} don't pay {tax}{cond}?"),
     {"who": ("students", "pensioners", "some pensioners"), "tax": ("council tax", "income tax"),
      "cond": ("", " abroad", " unless they work", " if they work")}),
    (("How does {cause} affect {effect}?", "What effect does {cause} have on {effect}?",
      "In what way is {effect} influenced by {cause}?"),
     {"cause": ("sleep", "lack of sleep", "caffeine"), "effect": ("memory", "appetite", "short-term memory")}),
    (("Convert {n} {from_} to {to}.", "How many {to} are {n} {from_}?", "{n} {from_} expressed in {to}, please"),
     {"n": ("7", "70", "7.5", "seventeen"), "from_": ("miles", "nautical miles"), "to": ("kilometres", "metres")}),
    (("When does the museum {event}?", "At what time does the museum {event}?",
      "Tell me the hour when the museum will {event}."),
     {"event": ("open on Sundays", "close on Sundays", "open on Mondays", "open on holidays", "close early")}),
    (("Which battery {prefers}?", "What type of battery {prefers}?", "Name the battery that {prefers}."),
     {"prefers": ("fits the remote control", "fits the smoke alarm", "lasts longest in the cold",
      "lasts longest in the heat",
                  "charges fastest", "charges slowest", "does not leak")}),
)  # fmt: skip


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


def generate_blind() -> Iterator[Pair]:
    """Yield pairs of intents: the same one in two wordings, and two that differ in one fact, in any wordings."""
    draw = random.Random(48)
    for forms, slots in BLIND_INTENTS:
        seen = set[tuple[str, str]]()
        for same in (True, False):
            pairs = 0
            while pairs < BLIND_PAIRS:
                facts = {name: draw.choice(values) for name, values in slots.items()}
                others, kind = facts, "paraphrase"
                if not same:
                    kind = draw.choice(list(slots))
                    other = draw.choice([each for each in slots[kind] if each != facts[kind]])
                    others = facts | {kind: other}
                wordings = (
                    draw.sample(forms, 2)
                    if same or draw.random() < 0.5
                    else [draw.choice(forms)] * 2
                )
                a, b = (
                    _word(draw, form, each)
                    for form, each in zip(wordings, (facts, others), strict=True)
                )
                if (a, b) not in seen:
                    seen.add((a, b))
                    pairs += 1
                    yield a, b, same, kind


def _word(draw: random.Random, form: str, facts: dict[str, str]) -> str:
    """Return a question as one user would type it."""
    text = draw.choice(BLIND_OPENINGS) + form.format(**facts) + draw.choice(BLIND_CLOSINGS)
    return text.lower() if draw.random() < 0.2 else text[0].upper() + text[1:]


GENERATORS = {
    "training": generate_training,
    "holdout": generate_holdout,
    "blind": generate_blind,
}


def main() -> None:
    """Print the pairs of a generator as JSON lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("generator", choices=GENERATORS)
    for a, b, same, kind in GENERATORS[parser.parse_args().generator]():
        print(json.dumps({"a": a, "b": b, "same": same, "kind": kind}))


if __name__ == "__main__":
    main()
