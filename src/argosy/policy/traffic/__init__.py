"""Traffic: which pool and which version of it answers a request.

A `TrafficRoute` is declared for a public model name. Its weights select a pool, and its fallback pools take over from
one that cannot serve in time. The `PoolRoute` of that pool selects the version. It is the one record
that a rollout writes, so a rollback is one write of `PoolRoute.roll_back`. Assignments are sticky: `hash_point` places
each user at a fixed point, and `choose_salt` finds a salt that divides the traffic evenly. A `ShadowSampler` selects
the requests that are copied to a version before it serves any user.
"""

from argosy.policy.traffic.pool_route import (
    PoolRoute,
    RouteRollback,
    ShadowCopy,
    ShadowSampler,
    Variant,
    VersionChoice,
    clamp_share,
)
from argosy.policy.traffic.sticky_hash import (
    ALL_TENANTS,
    SaltChoice,
    TrafficSubject,
    UserTraffic,
    choose_salt,
    choose_weighted,
    hash_point,
    heavy_tenants,
    sticky_key,
)
from argosy.policy.traffic.traffic_route import (
    DailyWindow,
    FlagUnit,
    PercentageFlag,
    ServingChoice,
    TrafficRoute,
    WeightedPool,
)
