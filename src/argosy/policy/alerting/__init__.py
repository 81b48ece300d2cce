"""Alerting: what fires, since when and until when, and which notices of it go where.

Sources report an `AlertCondition` for each thing that may be wrong. `update_alerts` turns these reports into `Alert`s.
Missing data keeps the state of an alert. An alert ends once its condition has been false for a while. Only
observed time counts, so that steps of the clock and gaps between two controllers change nothing.

`find_routes` selects the receivers of an alert. `update_groups` puts alerts into a `NoticeGroup` for each receiver, and
decides which group needs a `Notice` now. Alerts that a `Silence` covers, or that others explain, need none.
"""

from argosy.policy.alerting.alert import (
    Alert,
    AlertCondition,
    Severity,
    compute_fingerprint,
)
from argosy.policy.alerting.alert_states import DEFAULT_TIMING, AlertTiming, update_alerts
from argosy.policy.alerting.condition_timer import ConditionTimer
from argosy.policy.alerting.known_conditions import (
    NO_REPLICA_S,
    NOT_HEALED_S,
    describe_no_replica,
    describe_not_healed,
)
from argosy.policy.alerting.notices import Notice, NoticeGroup, update_groups
from argosy.policy.alerting.routing import (
    RECEIVER_FAILING,
    AlertRoute,
    LabelName,
    LabelPattern,
    Matchers,
    ReceiverName,
    ResolvedRoute,
    Silence,
    find_routes,
    find_silence,
    index_inhibitors,
)
