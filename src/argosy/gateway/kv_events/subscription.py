"""Who follows which replica: ours by its own stream, vLLM and SGLang by what they publish, others not at all."""

from __future__ import annotations

import asyncio

from argosy.gateway.kv_events.native_subscriber import EventFollower
from argosy.gateway.kv_events.text_block_maps import AGAIN_S, TextsOf
from argosy.gateway.kv_events.zmq_subscriber import EngineFollower
from argosy.gateway.pool import Replica


async def follow(replica: Replica, texts: TextsOf) -> None:
    """Follow a replica again and again, from when it is known what it is, if it is of a kind that tells.

    Those of a pool share its texts.
    """
    while replica.kind == "auto":  # noqa: ASYNC110 - the replica does not say when it is known
        await asyncio.sleep(AGAIN_S)
    follower = _follower(replica, texts)
    while follower is not None:
        again_s = await follower.follow()
        await asyncio.sleep(again_s)


def _follower(replica: Replica, texts: TextsOf) -> EventFollower | EngineFollower | None:
    if replica.kind == "argosy":
        return EventFollower(replica, texts)
    source = replica.dialect.kv_source
    return None if source is None else EngineFollower(replica, source, texts)
