from fedrax import (
    algorithms as algorithms,
)
from fedrax import (
    analysis as analysis,
)
from fedrax import (
    attacks as attacks,
)
from fedrax import (
    compression as compression,
)
from fedrax import (
    contract as contract,
)
from fedrax import (
    data as data,
)
from fedrax import (
    experiments as experiments,
)
from fedrax import (
    flower as flower,
)
from fedrax import (
    metrics as metrics,
)
from fedrax import (
    models as models,
)
from fedrax import (
    optim as optim,
)
from fedrax import (
    participation as participation,
)
from fedrax import (
    personalization as personalization,
)
from fedrax import (
    privacy as privacy,
)
from fedrax import (
    profiling as profiling,
)
from fedrax import (
    report as report,
)
from fedrax import (
    robust as robust,
)
from fedrax import (
    simulation as simulation,
)
from fedrax import (
    testing as testing,
)
from fedrax import (
    tree as tree,
)
from fedrax import (
    tuning as tuning,
)
from fedrax.algorithms.episode import Episode as Episode
from fedrax.algorithms.fedavg import FedAvg as FedAvg
from fedrax.algorithms.fedavg import FedProx as FedProx
from fedrax.algorithms.gradma import GradMA as GradMA
from fedrax.algorithms.losac import LoSAC as LoSAC
from fedrax.algorithms.scaffold import Scaffold as Scaffold
from fedrax.algorithms.upcycled import Upcycled as Upcycled
from fedrax.config.hyperparameters import hyperparameters as hyperparameters
from fedrax.contract.algorithm import Algorithm as Algorithm
from fedrax.contract.algorithm import ClientOutput as ClientOutput
from fedrax.contract.algorithm import Cohort as Cohort
from fedrax.contract.averaging import Averaging as Averaging
from fedrax.contract.client_data import ClientData as ClientData
from fedrax.contract.local_training import LocalSGD as LocalSGD
from fedrax.contract.task import Task as Task
from fedrax.contract.task import classification as classification
from fedrax.contract.task import regression as regression
from fedrax.contract.wrapper import Wrapper as Wrapper
from fedrax.data import Dataset as Dataset
from fedrax.data import Federation as Federation
from fedrax.errors import FedraxError as FedraxError
from fedrax.errors import FedraxWarning as FedraxWarning
from fedrax.experiments.run_comparison import compare as compare
from fedrax.simulation import Result as Result
from fedrax.simulation import Settings as Settings
from fedrax.simulation import simulate as simulate
from fedrax.testing import check_algorithm as check_algorithm
from fedrax.tuning import sweep as sweep
from fedrax.tuning import tune as tune

__version__: str
