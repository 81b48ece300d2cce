"""Service level objectives: which requests miss one, how much of its error budget is left, and how fast it burns.

An `Objective` is declared for a model, a tier or a tenant. `judge_request` decides by error code and by latency whether
an ended request counts for it. A `CountHistory` has the counts of all gateways by time. `evaluate` compares their burn
rates in the windows of the SRE workbook. Missing reports (`ReportCoverage`) decide nothing.
"""

from argosy.policy.objectives.burn_rates import (
    BURN_WINDOWS,
    MAX_MISS_RATE,
    OUTAGE_WINDOW,
    BurnWindow,
)
from argosy.policy.objectives.classification import (
    CODE_CLASSES,
    MISS_CAUSES,
    SLOW,
    CodeClass,
    EndedRequest,
    judge_request,
)
from argosy.policy.objectives.count_history import HOUR_S, SLOT_S, CountHistory, Counts, HourCounts
from argosy.policy.objectives.coverage import ReportCoverage
from argosy.policy.objectives.evaluation import (
    Budget,
    BudgetImpact,
    Evaluation,
    evaluate,
    explain,
    format_duration,
)
from argosy.policy.objectives.objective import Objective, Sli
from argosy.policy.objectives.rule_documents import RULE_FORMATS
