"""Map of the prefixes that recent prompts of a pool share, with the replicas that have them cached.

The map is built in slices of work. It looks up single blocks in the indexes of the replicas and never walks through
these, which may have millions of blocks. It contains no text, since the gateway keeps hashes. These stay here too,
because who knows them could test guesses of a text.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from argosy.gateway.event_loop import LoopSlices
from argosy.gateway.pool.pool import Pool
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.policy import BLOCK_TOKENS, PrefixNode, PrefixTree

MAX_SHOWN_REPLICAS = 64
"""Maximum number of replicas that a map names: those with most tokens of its prefixes."""
MAX_SHOWN_TENANTS = 5
"""Maximum number of tenants that a prefix names."""
ID_BYTES = 6

_ID_SECRET = secrets.token_bytes(32)


class CachedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a prefix that the same prompts have. The numbers of tokens are estimates."""

    id: str
    """Id of the prefix up to the end of this part, until this gateway stops."""
    parent: str | None
    """Id of the part before; None at the beginning of the prompts."""
    start_tokens: int
    """Tokens before this part."""
    tokens: int
    """Tokens of this part."""
    requests: int
    """Recent requests with this prefix."""
    last_sent_at: float
    """When the latest of them was sent."""
    tenants: dict[str, int]
    """Number of these requests by tenant, for the tenants with most."""
    cached_tokens: dict[str, int]
    """Tokens of this part that each replica has cached. Replicas without any are left out."""
    holders: int
    """Number of replicas that have all of this part cached."""


class ReplicaCache(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix cache of a replica, as the gateway knows it."""

    replica: str
    source: Literal["events", "estimate"]
    """Whether the replica reports its blocks, or the gateway estimates them from the prompts that it sent there."""
    tokens: int
    """Tokens in all cached blocks that the gateway knows of."""


class PrefixMap(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="prefix.map"):
    """Prefixes of the recent prompts of one version of a model."""

    model: str
    version: str
    """Digest of the version; empty without rollouts."""
    recent_requests: int
    """Recent requests of this gateway with a prompt of at least one block."""
    since: float | None
    """When the oldest of them was sent."""
    prefixes: list[CachedPrefix]
    """Prefixes whose caching saves most, each before the parts that continue it."""
    replicas: list[ReplicaCache]
    replica_count: int
    """Number of all replicas."""


async def build_prefix_map(pool: Pool, max_prefixes: int) -> PrefixMap:
    """Build the map of a pool with at most this many prefixes."""
    prompts, replicas = list(pool.recent_prompts), list(pool.replicas.values())
    tree = PrefixTree()
    slices = LoopSlices()
    for prompt in prompts:
        tree.add(prompt)
        await slices.pause()
    nodes = tree.find_heaviest(max_prefixes)
    cached = await _count_cached_blocks(nodes, replicas, slices)
    totals: Counter[str] = Counter()
    for counts in cached.values():
        totals.update(counts)
    shown = {name for name, _ in totals.most_common(MAX_SHOWN_REPLICAS)}
    for replica in replicas[: MAX_SHOWN_REPLICAS - len(shown)]:
        shown.add(replica.name)
    wall_offset = time.time() - time.monotonic()
    return PrefixMap(
        model=pool.model,
        version=pool.version,
        recent_requests=len(prompts),
        since=prompts[0].sent_at + wall_offset if prompts else None,
        prefixes=[_describe(node, cached[node], shown, wall_offset) for node in nodes],
        replicas=[_describe_cache(each) for each in replicas if each.name in shown],
        replica_count=len(replicas),
    )


async def _count_cached_blocks(
    nodes: Sequence[PrefixNode], replicas: Sequence[ReplicaEndpoint], slices: LoopSlices
) -> dict[PrefixNode, dict[str, int]]:
    """Return how many blocks of each node each replica has cached, without the replicas that have none.

    A prefix that ends a branch is looked up once for each replica, which covers the nodes above it.
    """
    cached: dict[PrefixNode, dict[str, int]] = {node: {} for node in nodes}
    inner = {node.parent for node in nodes}
    ends = [(node, node.keys[: node.end]) for node in nodes if node not in inner]
    for replica in replicas:
        for end, keys in ends:
            matched = len(replica.prefix_index.match_prefix(keys))
            node: PrefixNode | None = end
            while matched and node in cached:
                blocks = min(matched, node.end) - node.start
                if blocks > cached[node].get(replica.name, 0):
                    cached[node][replica.name] = blocks
                node = node.parent
        await slices.pause()
    return cached


def _describe(
    node: PrefixNode, cached: dict[str, int], shown: set[str], wall_offset: float
) -> CachedPrefix:
    parent = node.parent
    return CachedPrefix(
        id=_node_id(node),
        parent=None if parent is None or not parent.end else _node_id(parent),
        start_tokens=node.start * BLOCK_TOKENS,
        tokens=node.blocks * BLOCK_TOKENS,
        requests=node.prompts,
        last_sent_at=node.last_sent_at + wall_offset,
        tenants=dict(node.tenants.most_common(MAX_SHOWN_TENANTS)),
        cached_tokens={
            name: blocks * BLOCK_TOKENS for name, blocks in cached.items() if name in shown
        },
        holders=sum(blocks == node.blocks for blocks in cached.values()),
    )


def _node_id(node: PrefixNode) -> str:
    key = node.keys[node.end - 1]
    return hashlib.blake2b(key, key=_ID_SECRET, digest_size=ID_BYTES).hexdigest()


def _describe_cache(replica: ReplicaEndpoint) -> ReplicaCache:
    index = replica.prefix_index
    return ReplicaCache(
        replica=replica.name,
        source="events" if index.is_reported else "estimate",
        tokens=index.count_tokens(),
    )
