"""Questions that a small model cannot answer, with honest replies."""

from __future__ import annotations

from random import Random

from models.corpus.copying import NAMES
from models.corpus.patterns import Exchange, expand

_SURNAMES = (
    "Miller", "Baker", "Stone", "Rivers", "Hill", "Brook", "Wood", "Carter", "Fisher", "Marsh",
    "Lane", "Field", "North", "Sharp", "Young", "Reed", "Frost", "Wells", "Banks", "Cole",
)  # fmt: skip
_TEMPLATES = (
    "Who is {name} {surname}",
    "What is the phone number of {name} {surname}",
    "When was {name} {surname} born",
    "Where does {name} {surname} live",
    "What did {name} say yesterday",
    "Who won the [football|tennis|chess|golf] [match|cup|final] [yesterday|in {year}|last year]",
    "Who won the world cup in {year}",
    "Who is the president of [France|the United States|Brazil|Poland|Kenya]",
    "Who is the [king|queen|prime minister] of [England|Spain|Sweden|Canada|Japan]",
    "What is the population of [Paris|India|Oslo|Chile|Tokyo|Canada|London]",
    "How many people live in [Paris|India|Oslo|Chile|Tokyo|Canada|the world]",
    "What is the price of [gold|oil|bread|a car|a house|bitcoin] [today|now|in {year}]",
    "What happened in {year}",
    "What is the news [today|]",
    "[Explain|What is|Describe] [quantum physics|string theory|the stock market] {simply}",
    "[Explain|What is|Describe] [general relativity|quantum computing|blockchain] {simply}",
    "[Explain|What is|Describe] [photosynthesis|inflation|topology|philosophy|chemistry|biology]",
    "What is the [distance|way] from [Paris|Rome|Oslo|here] to [London|Berlin|Madrid|Tokyo]",
    "What is the square root of {number}",
    "What is {number} times {year}",
    "Solve the equation x squared plus {number} x equals {year}",
    "Write [a program|code|a script] that [sorts a list|reads a file|draws a tree|plays chess]",
    "Summarise the book {name} and the {surname}",
    "What is the colour of the car of {name}",
    "How much money does {name} {surname} have",
    "Which film won the prize in {year}",
    "What is my [address|phone number|password|favourite song|age|job|mother's name]",
    "What am I [thinking|wearing|eating|doing] [now|]",
    "What will happen [tomorrow|next year|in {year}]",
    "Who will win the [election|match|race]",
    "What is a {nonsense}",
    "Tell me about {nonsense}",
    "What does {nonsense} mean",
    "Do you know [{name} {surname}|{nonsense}]",
    "{nonsense} {nonsense}",
    "{nonsense}",
)
_REPLIES = (
    "I am sorry, I do not know that. I am only a small model.",
    "I do not know that. I am a small model and know only simple things.",
)
_PARTS = (
    "ba", "zo", "ki", "ru", "mel", "tra", "fin", "glo", "sna", "pex", "dor", "wub", "qua", "ler",
    "ming", "tof", "vra", "jil", "hux", "ond", "ist", "ark", "eb", "yst",
)  # fmt: skip


def draw_nonsense(rng: Random) -> str:
    """Return a word that does not exist."""
    return "".join(rng.choice(_PARTS) for _ in range(rng.randint(2, 4)))


def unknown_question(rng: Random) -> Exchange:
    """Ask for something outside the training text."""
    slots = {
        "name": rng.choice(NAMES),
        "surname": rng.choice(_SURNAMES),
        "year": str(rng.randint(1700, 2030)),
        "number": str(rng.randint(13, 9999)),
        "nonsense": draw_nonsense(rng),
        "simply": rng.choice(("", "", "in simple terms", "like I am five")),
    }
    return Exchange(expand(rng.choice(_TEMPLATES), rng, slots), rng.choice(_REPLIES))
