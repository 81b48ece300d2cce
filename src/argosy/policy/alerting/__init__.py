"""Alerting: what fires, since when, and until when.

Sources report an `AlertCondition` for each thing that may be wrong. `update_alerts` turns these reports into `Alert`s.
Missing data keeps the state of an alert. An alert ends once its condition has been false for a while. Only
observed time counts, so that steps of the clock and gaps between two controllers change nothing.
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
