from fedrax.experiments.audit import Audit as Audit
from fedrax.experiments.audit import guess_canaries as guess_canaries
from fedrax.experiments.audit import watch_a_client as watch_a_client
from fedrax.experiments.comparison import Comparison as Comparison
from fedrax.experiments.experiment import Experiment as Experiment
from fedrax.experiments.run_comparison import ComparisonResult as ComparisonResult
from fedrax.experiments.run_comparison import compare as compare
from fedrax.experiments.run_comparison import read_file as read_file
