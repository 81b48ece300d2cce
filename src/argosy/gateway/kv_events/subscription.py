"""Choice of the KV event subscriber for a replica, by the kind of its backend."""

from __future__ import annotations

import asyncio

from argosy.gateway.kv_events.native_subscriber import NativeKvEventSubscriber
from argosy.gateway.kv_events.text_block_maps import RETRY_INTERVAL_S, TextBlockMaps
from argosy.gateway.kv_events.zmq_subscriber import ZmqKvEventSubscriber
from argosy.gateway.pool import ReplicaEndpoint


async def subscribe(replica: ReplicaEndpoint, text_block_maps: TextBlockMaps) -> None:
    """Subscribe to a replica's KV events, again after every failure.

    The function waits until the kind of the replica is known. It returns at once for a kind without KV events, and
    otherwise runs until it is cancelled. The replicas of a pool share `text_block_maps`.
    """
    while replica.kind == "auto":  # noqa: ASYNC110 - the replica has no event for a detected kind
        await asyncio.sleep(RETRY_INTERVAL_S)
    subscriber: NativeKvEventSubscriber | ZmqKvEventSubscriber
    if replica.kind == "argosy":
        subscriber = NativeKvEventSubscriber(replica, text_block_maps)
    elif replica.adapter.kv_event_source is not None:
        source = replica.adapter.kv_event_source
        subscriber = ZmqKvEventSubscriber(replica, source, text_block_maps)
    else:
        return
    while True:
        retry_in_s = await subscriber.run_once()
        await asyncio.sleep(retry_in_s)
