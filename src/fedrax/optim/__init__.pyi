from fedrax.optim.cone import project as project
from fedrax.optim.optax_adapter import Optax as Optax
from fedrax.optim.proximal import L1 as L1
from fedrax.optim.proximal import Box as Box
from fedrax.optim.proximal import ElasticNet as ElasticNet
from fedrax.optim.proximal import NuclearNorm as NuclearNorm
from fedrax.optim.schedules import (
    Constant as Constant,
)
from fedrax.optim.schedules import (
    CosineDecay as CosineDecay,
)
from fedrax.optim.schedules import (
    ExponentialDecay as ExponentialDecay,
)
from fedrax.optim.schedules import (
    InverseDecay as InverseDecay,
)
from fedrax.optim.schedules import (
    StepDecay as StepDecay,
)
from fedrax.optim.server import SGD as SGD
from fedrax.optim.server import Adagrad as Adagrad
from fedrax.optim.server import Adam as Adam
from fedrax.optim.server import Yogi as Yogi
