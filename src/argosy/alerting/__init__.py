"""Alerting of a fleet, in its leading controller, or in a gateway without a controller.

An `AlertLoop` asks its sources for conditions every 10 seconds and keeps the alerts as an `AlertState`, which
`AlertRecords` reads from and writes to the store. The notices that have to be sent are a part of it, so that a process
that takes over sends what the last one did not. A `Notifier` delivers them through `NoticeChannels`. An `OrderBook` has
the silences and test notices that people order. Decisions are those of `policy.alerting`.

A `TrafficWatch` is the source of changes of traffic, and `ReceivedAlerts` that of other programs' alerts. An
`IncidentKeeper` keeps the incidents that follow from the alerts, which people change by `IncidentRecords`.
"""

from argosy.alerting.alert_admin import AlertAdmin, ShownAlert
from argosy.alerting.alert_loop import AlertLoop, AlertSource
from argosy.alerting.alert_orders import (
    MAX_SILENCE_S,
    AlertOrders,
    OrderBook,
    TestOrder,
)
from argosy.alerting.alert_records import (
    STANDALONE_FLEET,
    AlertRecords,
    AlertState,
    ReceiverState,
    TestResult,
    read_alerts,
)
from argosy.alerting.backup_alerts import BackupAlerts, judge_backups
from argosy.alerting.budget_alerts import BudgetAlerts
from argosy.alerting.incident_keeper import IncidentKeeper
from argosy.alerting.incident_records import IncidentRecords
from argosy.alerting.machine_alerts import MachineAlerts
from argosy.alerting.objective_alerts import ObjectiveAlerts
from argosy.alerting.received_alerts import (
    MAX_RECEIVED,
    ReceivedAlert,
    ReceivedAlerts,
    receive_alerts,
)
from argosy.alerting.traffic_watch import TrafficStatus, TrafficWatch, read_traffic_status
