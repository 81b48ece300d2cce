"""What each replica's prefix cache holds, as it tells itself, so that requests are routed by what is really there."""

from argosy.gateway.kv_events.subscription import subscribe
from argosy.gateway.kv_events.text_block_maps import TextBlockMaps

__all__ = ["TextBlockMaps", "subscribe"]
