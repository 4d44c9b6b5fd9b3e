from fedrax.robust.attacked_clients import (
    ALittle as ALittle,
)
from fedrax.robust.attacked_clients import (
    Attacked as Attacked,
)
from fedrax.robust.attacked_clients import (
    Gaussian as Gaussian,
)
from fedrax.robust.attacked_clients import (
    LabelFlip as LabelFlip,
)
from fedrax.robust.attacked_clients import (
    Scaling as Scaling,
)
from fedrax.robust.rules import (
    GeometricMedian as GeometricMedian,
)
from fedrax.robust.rules import (
    Krum as Krum,
)
from fedrax.robust.rules import (
    Median as Median,
)
from fedrax.robust.rules import (
    NormBound as NormBound,
)
from fedrax.robust.rules import (
    TrimmedMean as TrimmedMean,
)
from fedrax.robust.wrapper import Robust as Robust
