"""Quality of models: golden sets, their readers, and runs that grade and compare the answers of models.

`read_golden_set` reads a `GoldenSet` from a file in the format of another tool. A `GoldenSetRun` sends its requests
through a `ModelClient` for each model, grades the answers by assertions and a judge, and stops early once
`policy.quality` has enough evidence. The reports write its `RunResult` as JSON lines and as JUnit XML.
"""

from argosy.quality.assertions import Answer, check_answer, check_calls
from argosy.quality.golden_set import GoldenSet, decode_set
from argosy.quality.golden_set_run import DEFAULT_MARGIN, GoldenSetRun, RunResult, RunSummary
from argosy.quality.judge import MAX_JUDGED_CHARS, build_grading, read_score
from argosy.quality.model_client import AnswerCache, ModelClient, QualityRunError, SendRequest
from argosy.quality.run_reports import (
    describe_comparison,
    describe_run,
    describe_stored_run,
    format_jsonl,
    format_junit,
)
from argosy.quality.set_files import read_golden_set, read_labels
