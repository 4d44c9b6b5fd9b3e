from fedrax.report.html import write_report as write_report
from fedrax.report.results import MethodResults as MethodResults
from fedrax.report.results import SavedResults as SavedResults
from fedrax.report.results import read_results as read_results
from fedrax.report.runs import find_runs as find_runs
from fedrax.report.runs import read_run as read_run
from fedrax.report.sinks import (
    JsonSink as JsonSink,
)
from fedrax.report.sinks import (
    MlflowSink as MlflowSink,
)
from fedrax.report.sinks import (
    TensorBoardSink as TensorBoardSink,
)
from fedrax.report.sinks import (
    WandbSink as WandbSink,
)
