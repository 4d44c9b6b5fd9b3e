from fedrax.experiments.audit import Audit as Audit
from fedrax.experiments.audit import audit_canaries as audit_canaries
from fedrax.experiments.audit import audit_client as audit_client
from fedrax.experiments.comparison import Comparison as Comparison
from fedrax.experiments.experiment import Experiment as Experiment
from fedrax.experiments.run_comparison import ComparisonResult as ComparisonResult
from fedrax.experiments.run_comparison import compare as compare
from fedrax.experiments.run_comparison import read_file as read_file
