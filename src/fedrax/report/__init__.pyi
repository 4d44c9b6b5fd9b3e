from fedrax.report.html import write_report as write_report
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
