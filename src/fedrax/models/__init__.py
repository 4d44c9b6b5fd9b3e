"""Models: the zoo, and what wraps models users bring."""

from fedrax.models.model import Model as Model
from fedrax.models.zoo import MLP as MLP
from fedrax.models.zoo import MODELS as MODELS
from fedrax.models.zoo import Linear as Linear
from fedrax.models.zoo import Logistic as Logistic
from fedrax.models.zoo import TwoNN as TwoNN
