"""The load generator: plans of requests, a client that measures them, reports and comparisons."""

from argosy.bench.arrivals import Arrivals, arrival_times
from argosy.bench.comparison import Ratio, compare, comparison_text
from argosy.bench.errors import BenchError
from argosy.bench.export import prometheus_text, rows_csv
from argosy.bench.lengths import Lengths, parse_lengths
from argosy.bench.metrics import Objectives, Row, Stats, Summary, stats, summarize, values
from argosy.bench.noise_floor import NoiseFloor, noise_report, self_check
from argosy.bench.objectives import parse_objectives
from argosy.bench.plan import Plan, PlannedRequest
from argosy.bench.report_html import html_report
from argosy.bench.report_text import text_report
from argosy.bench.result import Point, Result, Settings, load, save, write
from argosy.bench.runner import Watcher, run
from argosy.bench.target import Wishes
from argosy.bench.traces import Traced, read_trace
from argosy.bench.workload import Load, Workload, make_plan

__all__ = [
    "Arrivals",
    "BenchError",
    "Lengths",
    "Load",
    "NoiseFloor",
    "Objectives",
    "Plan",
    "PlannedRequest",
    "Point",
    "Ratio",
    "Result",
    "Row",
    "Settings",
    "Stats",
    "Summary",
    "Traced",
    "Watcher",
    "Wishes",
    "Workload",
    "arrival_times",
    "compare",
    "comparison_text",
    "html_report",
    "load",
    "make_plan",
    "noise_report",
    "parse_lengths",
    "parse_objectives",
    "prometheus_text",
    "read_trace",
    "rows_csv",
    "run",
    "save",
    "self_check",
    "stats",
    "summarize",
    "text_report",
    "values",
    "write",
]
