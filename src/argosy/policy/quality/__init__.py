"""Quality: whether a version's answers are worse than another's on the same items, and how far a judge can be trusted.

A `PairedComparison` counts the differences of scores cluster by cluster, and may stop at each. `calibrate_judge`
compares the scores of a judge with labels of people.
"""

from argosy.policy.quality.judge_calibration import JudgeCalibration, calibrate_judge
from argosy.policy.quality.paired_comparison import (
    PairedComparison,
    QualityComparison,
    QualityVerdict,
)
