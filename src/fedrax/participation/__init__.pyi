from fedrax.participation.asynchronous import (
    Arrivals as Arrivals,
)
from fedrax.participation.asynchronous import (
    Asynchronous as Asynchronous,
)
from fedrax.participation.availability import (
    Availability as Availability,
)
from fedrax.participation.importance_sampling import (
    ImportanceSampling as ImportanceSampling,
)
from fedrax.participation.oort import (
    Oort as Oort,
)
from fedrax.participation.policies import (
    FixedList as FixedList,
)
from fedrax.participation.policies import (
    Participation as Participation,
)
from fedrax.participation.policies import (
    Poisson as Poisson,
)
from fedrax.participation.policies import (
    RoundRobin as RoundRobin,
)
from fedrax.participation.policies import (
    Uniform as Uniform,
)
from fedrax.participation.policies import (
    WeightedBySamples as WeightedBySamples,
)
from fedrax.participation.policy import (
    CohortSizes as CohortSizes,
)
from fedrax.participation.policy import (
    ParticipationPolicy as ParticipationPolicy,
)
from fedrax.participation.policy import (
    Population as Population,
)
from fedrax.participation.power_of_choice import (
    PowerOfChoice as PowerOfChoice,
)
