"""Short common English words, which are single tokens for most tokenizers."""

from __future__ import annotations

_WORD_LIST = """
    the of and to in is was for that on as with by at from his it an are which this be or had first not one
    their has its new after but who they two her she been other when time during there into all may more
    year over only up out most would about where used part well long great high old small large next early
    young few public same able people way day man thing woman life child world school state family student
    group country hand place case week company system program question work night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head
    house service friend father power hour game line end member law car city community name team minute
    idea body back parent face level office door health person art war history party result change morning
    reason research girl guy moment air teacher force order field road light music
"""
WORDS: tuple[str, ...] = tuple(_WORD_LIST.split())
