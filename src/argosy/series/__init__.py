"""Time series of a gateway, kept in its process and in a file of its own.

`SeriesRecorder` counts requests, tokens, cost and latencies as they happen. Ring buffers of
fixed size (`ScopeRings`) keep seconds, steps of 10 s, and minutes. `SeriesArchive` keeps the minutes in an
SQLite file. `read_series` and `fill_from_archive` read a range as a `SeriesFrame`. Frames of several gateways are
merged by addition (`merge_gateways`), and `compute_metrics` turns the result into rates, ratios and percentiles.
`RequestCells` count the same requests by the minute, for `policy.detection`.
"""

from argosy.series.archive import SeriesArchive
from argosy.series.frame import SeriesFrame, merge_gateways
from argosy.series.log_histogram import LogHistogram, decode_counts, percentiles
from argosy.series.metrics import check_metrics, compute_metrics, metric_names, needed_histograms
from argosy.series.reader import MAX_STEPS, choose_step, fill_from_archive, read_series
from argosy.series.recorder import MinuteRow, Readings, SeriesRecorder
from argosy.series.request_sample import RequestSample
from argosy.series.schema import SCHEMAS, STEP_PHASES, ScopeKind, scope_kind
