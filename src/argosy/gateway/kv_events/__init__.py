"""Subscriptions to the KV events of replicas, so that requests are routed by the prefixes that replicas really hold.

The function `subscribe` runs one subscriber per replica. Native replicas send their events in an HTTP stream, which a
`NativeKvEventSubscriber` reads. vLLM and SGLang publish theirs over ZeroMQ. For them a `ZmqKvEventSubscriber` receives
batches from a `ZmqSubscription`, decodes them with a `KvEventDecoder`, and requests a replay of missed batches. Either
subscriber gives the replica an `EventPrefixIndex`. Without a subscription, the replica keeps an index that is estimated
from the prompts sent to it. All replicas that tokenize alike share one of the `TextBlockMaps`.
"""

from argosy.gateway.kv_events.subscription import subscribe
from argosy.gateway.kv_events.text_block_maps import TextBlockMaps
