"""Who follows which replica: ours by its own stream, vLLM and SGLang by what they publish, others not at all."""

from __future__ import annotations

import asyncio

from argosy.gateway.kv_events.native_subscriber import NativeKvEventSubscriber
from argosy.gateway.kv_events.text_block_maps import RETRY_INTERVAL_S, TextBlockMaps
from argosy.gateway.kv_events.zmq_subscriber import ZmqKvEventSubscriber
from argosy.gateway.pool import ReplicaEndpoint


async def subscribe(replica: ReplicaEndpoint, text_block_maps: TextBlockMaps) -> None:
    """Follow a replica again and again, from when it is known what it is, if it is of a kind that tells.

    Those of a pool share its texts.
    """
    while replica.kind == "auto":  # noqa: ASYNC110 - the replica does not say when it is known
        await asyncio.sleep(RETRY_INTERVAL_S)
    follower = _create_subscriber(replica, text_block_maps)
    while follower is not None:
        again_s = await follower.run_once()
        await asyncio.sleep(again_s)


def _create_subscriber(
    replica: ReplicaEndpoint, text_block_maps: TextBlockMaps
) -> NativeKvEventSubscriber | ZmqKvEventSubscriber | None:
    if replica.kind == "argosy":
        return NativeKvEventSubscriber(replica, text_block_maps)
    source = replica.adapter.kv_event_source
    return None if source is None else ZmqKvEventSubscriber(replica, source, text_block_maps)
