"""Short stories made from plots, heroes and things, for conversations and for plain prose."""

from __future__ import annotations

from random import Random

from models.corpus.patterns import Exchange, capitalise, expand, read_lines, read_paragraphs

NAMES = read_lines("names.txt")
PLOTS = tuple(paragraph.splitlines() for paragraph in read_paragraphs("plots.txt"))
HEROES = (
    "fox", "mouse", "dragon", "robot", "cat", "dog", "bear", "rabbit", "owl", "princess", "prince",
    "knight", "girl", "boy", "king", "queen", "wizard", "witch", "sailor", "frog", "hedgehog",
    "duck", "horse", "lion", "tiger", "elephant", "penguin", "whale", "dolphin", "giant", "elf",
    "pirate", "baker", "farmer", "teacher", "wolf", "bird", "bee", "snail", "turtle", "unicorn",
    "monkey", "squirrel", "star", "cloud", "computer", "ghost", "astronaut", "ship", "tree",
)  # fmt: skip
_PLACES = (
    "in a quiet valley", "near the sea", "at the edge of a forest", "in a small village",
    "on a green hill", "by a silver lake", "in the mountains", "on a tiny island",
    "beside an old mill", "in a land far away",
)  # fmt: skip
_THINGS = (
    "a golden key", "an old map", "a silver bell", "a blue lantern", "a small wooden box",
    "a round mirror", "a long rope", "a red umbrella", "a shining stone", "an old book",
    "a warm blanket", "a little flute",
)  # fmt: skip
_STRANGERS = (
    "an old woman", "an old man", "a little girl", "a small boy", "a lonely giant",
    "a tired traveller", "a young sailor", "a poor musician",
)  # fmt: skip
_FRIENDS = ("the owl", "the fox", "the old bear", "the hare", "the turtle", "the grey goose")


def draw_slots(rng: Random, hero: str) -> dict[str, str]:
    """Return a consistent selection of the people, places and things of a story."""
    name, other = rng.sample(NAMES, 2)
    thing, stranger = rng.choice(_THINGS), rng.choice(_STRANGERS)
    friend = rng.choice((*_FRIENDS, other, other))
    return {
        "hero": hero, "name": name, "friend": friend, "place": rng.choice(_PLACES),
        "thing": thing, "the_thing": "the " + thing.split(" ", 1)[1],
        "stranger": stranger, "stranger_noun": stranger.split(" ", 1)[1],
    }  # fmt: skip


def draw_story(rng: Random, hero: str) -> str:
    """Return a story of eight to twelve sentences about the hero."""
    chosen = draw_slots(rng, hero)
    sentences = (capitalise(expand(line, rng, chosen)) for line in rng.choice(PLOTS))
    text = " ".join(sentences)
    for vowel in "aeiou":
        text = text.replace(f" a {vowel}", f" an {vowel}")
    return text


def story_question(rng: Random) -> Exchange:
    """Ask for a story, sometimes about a given hero."""
    hero = rng.choice(HEROES)
    verb = "[Tell me|Tell me|Write|Write me|Can you tell me|Give me|Tell|Make up|I want to hear]"
    kind = (
        "[a story|a story|a short story|a long story|a very long story|a funny story"
        "|a little story|another story|a tale|a bedtime story]"
    )
    request = expand(f"{verb} {kind}", rng)
    if rng.random() < 0.1:
        request = rng.choice(("Story", "A story please", "Another story please", "Story time"))
    elif rng.random() < 0.5:
        article = "an" if hero[0] in "aeiou" else "a"
        size = rng.choice(("", "", "little ", "young ", "brave "))
        article = "a" if size else article
        request += f" about {article} {size}{hero}"
    return Exchange(request, draw_story(rng, hero))
