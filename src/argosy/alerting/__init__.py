"""Alerting of a fleet, in its leading controller, or in a gateway without a controller.

An `AlertLoop` asks its sources for conditions every 10 seconds and keeps the alerts as an `AlertState`, which
`AlertRecords` reads from and writes to the store. Decisions are those of `policy.alerting`.
"""

from argosy.alerting.alert_loop import AlertLoop, AlertSource
from argosy.alerting.alert_records import AlertRecords, AlertState, read_alerts
