"""Quality: whether a version's answers are worse than another's, and how far a judge can be trusted.

A `PairedComparison` counts the differences of scores cluster by cluster, and may stop at each. The function
`calibrate_judge` compares the scores of a judge with labels of people. The function `compare_samples` compares answers
to different requests.
"""

from argosy.policy.quality.judge_calibration import JudgeCalibration, calibrate_judge
from argosy.policy.quality.paired_comparison import (
    PairedComparison,
    QualityComparison,
    QualityVerdict,
)
from argosy.policy.quality.sample_comparison import (
    SampleComparison,
    SampleCounts,
    compare_samples,
)
