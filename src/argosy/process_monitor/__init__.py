"""Monitor of one replica process: `python -m argosy.process_monitor`, started by a launcher, independent of it.

The monitor is the parent of the replica. It keeps its log, follows its reports, limits its memory, kills it after the
drain deadline and records its exit status, also while no launcher runs. It imports little, because there is one for
each replica.
"""

from argosy.process_monitor.memory_limit import count_oom_kills, own_cgroup
from argosy.process_monitor.messages import (
    DRAIN_SIGNAL,
    REPORT_VARIABLE,
    STOP_SIGNAL,
    MonitorSettings,
    ProcessReport,
    ProcessStatus,
    StartupReporter,
)
from argosy.process_monitor.process_output import read_log_end
