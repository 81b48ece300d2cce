"""Load generator and benchmark for OpenAI-compatible servers.

A `Workload`, a `LoadSpec` and a seed determine a `LoadPlan` (`build_plan`): which requests are sent when. A driver
sends the plan's requests, and records a `RequestRow` for each. `run_benchmark` probes the server,
drives each load, and searches for the highest rate if that is requested. A `BenchResult` holds the rows and their
summaries, and can be saved. The reports, exports and `compare_results` read results and send no requests.
"""

from argosy.bench.comparison import MeasureRatio, compare_results, format_comparison
from argosy.bench.distributions import (
    ArrivalProcess,
    LengthDistribution,
    draw_arrival_times,
    parse_length_distribution,
)
from argosy.bench.errors import BenchError
from argosy.bench.export import format_csv, format_prometheus
from argosy.bench.input_files import TraceRequest, read_trace
from argosy.bench.metrics import (
    PERCENTILES,
    MetricName,
    Objectives,
    RequestRow,
    RunSummary,
    SampleStats,
    compute_stats,
    metric_values,
    summarize,
)
from argosy.bench.noise_floor import NoiseFloor, measure_noise_floor, render_noise_floor
from argosy.bench.objectives import parse_objectives
from argosy.bench.plan import LoadPlan, PlannedRequest
from argosy.bench.report_html import render_html_report
from argosy.bench.report_text import render_text_report
from argosy.bench.result import (
    BenchResult,
    BenchSettings,
    RunResult,
    load_result,
    save_result,
    write_file,
)
from argosy.bench.runner import ProgressListener, run_benchmark
from argosy.bench.svg import PlotSeries, render_plot
from argosy.bench.target import BenchTarget
from argosy.bench.workload import LoadSpec, Workload, build_plan
