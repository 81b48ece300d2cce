"""Detection: whether the traffic of a model, a tenant or a replica has changed, since when, where, and after what.

Gateways count requests in `TrafficCell`s, by the minute. A `TrafficMonitor` turns them into shares of `EVENTS`, such
as first tokens above the 90th percentile of the weeks before. A `ChangeDetector` compares a share with its
`SeasonalBaseline`, or a replica with the others of its version in the same minutes. Both need
a minimum effect, so that real days may differ. `rank_slices` names where the excess is, and `rank_changes` what
happened before.
"""

from argosy.policy.detection.attribution import (
    WINDOW_S,
    PastChange,
    RankedChange,
    Slice,
    rank_changes,
    rank_slices,
)
from argosy.policy.detection.baseline import SeasonalBaseline, hour_of_week
from argosy.policy.detection.detector import ChangeDetector, beta_binomial_factor
from argosy.policy.detection.request_signals import (
    LANGUAGES,
    PROJECTIONS,
    RequestSignals,
    find_language,
    fingerprint_template,
    project_embedding,
)
from argosy.policy.detection.stream_state import (
    AcceptedVersion,
    MonitorState,
    StreamDeviation,
)
from argosy.policy.detection.traffic_cell import EVENTS, CellKey, CellMinute, EventKind, TrafficCell
from argosy.policy.detection.traffic_monitor import StreamStatus, TrafficMonitor
