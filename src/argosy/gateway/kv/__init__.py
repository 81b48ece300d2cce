"""What each replica's prefix cache holds, as it tells itself, so that requests are routed by what is really there."""

from argosy.gateway.kv.following import follow
from argosy.gateway.kv.texts import TextsOf

__all__ = ["TextsOf", "follow"]
