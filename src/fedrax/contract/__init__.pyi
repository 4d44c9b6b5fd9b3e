from fedrax.config.annotations import Leaf as Leaf
from fedrax.config.annotations import Static as Static
from fedrax.config.hyperparameters import (
    Decay as Decay,
)
from fedrax.config.hyperparameters import (
    Fraction as Fraction,
)
from fedrax.config.hyperparameters import (
    NonNegative as NonNegative,
)
from fedrax.config.hyperparameters import (
    NonNegativeInt as NonNegativeInt,
)
from fedrax.config.hyperparameters import (
    Positive as Positive,
)
from fedrax.config.hyperparameters import (
    PositiveInt as PositiveInt,
)
from fedrax.config.hyperparameters import check as check
from fedrax.config.hyperparameters import (
    hyperparameters as hyperparameters,
)
from fedrax.contract.algorithm import (
    Algorithm as Algorithm,
)
from fedrax.contract.algorithm import (
    ClientOutput as ClientOutput,
)
from fedrax.contract.algorithm import (
    Cohort as Cohort,
)
from fedrax.contract.algorithm import (
    Info as Info,
)
from fedrax.contract.algorithm import (
    Phase as Phase,
)
from fedrax.contract.averaging import Averaging as Averaging
from fedrax.contract.client_data import ClientData as ClientData
from fedrax.contract.local_training import LocalResult as LocalResult
from fedrax.contract.local_training import LocalSGD as LocalSGD
from fedrax.contract.local_training import Step as Step
from fedrax.contract.local_training import (
    proximal_term as proximal_term,
)
from fedrax.contract.model import Model as Model
from fedrax.contract.model import Variables as Variables
from fedrax.contract.table import VectorTable as VectorTable
from fedrax.contract.task import (
    Batch as Batch,
)
from fedrax.contract.task import (
    Task as Task,
)
from fedrax.contract.task import (
    binary_classification as binary_classification,
)
from fedrax.contract.task import (
    classification as classification,
)
from fedrax.contract.task import (
    margin as margin,
)
from fedrax.contract.task import (
    objective as objective,
)
from fedrax.contract.task import (
    regression as regression,
)
from fedrax.contract.task import (
    rescale as rescale,
)
from fedrax.contract.task import (
    supervised as supervised,
)
from fedrax.contract.traits import Traits as Traits
from fedrax.contract.vectors import ServerVectors as ServerVectors
from fedrax.contract.wrapper import Wrapped as Wrapped
from fedrax.contract.wrapper import Wrapper as Wrapper
