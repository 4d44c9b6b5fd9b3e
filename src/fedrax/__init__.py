"""fedrax: federated optimization on heterogeneous clients.

    import fedrax

    result = fedrax.simulate(fedrax.Scaffold(local=fedrax.LocalSGD(lr=0.1, steps=10)), task, federation, rounds=100)

The names of this package are those that most programs need. The others are in namespaces: `fedrax.algorithms`,
`fedrax.optim`, `fedrax.robust`, `fedrax.compression`, `fedrax.personalization`, `fedrax.privacy`,
`fedrax.participation`, `fedrax.data`, `fedrax.models`, `fedrax.metrics`, `fedrax.contract` (for authors of methods),
`fedrax.testing`, `fedrax.simulation`, `fedrax.tuning`, `fedrax.experiments`, `fedrax.report`, `fedrax.analysis`,
`fedrax.profiling`, `fedrax.attacks`, `fedrax.flower` and `fedrax.tree`.
"""

from fedrax.lazy import attach_stub
from fedrax.version import VERSION

__version__ = VERSION
__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
