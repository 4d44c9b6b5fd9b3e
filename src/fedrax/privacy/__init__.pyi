from fedrax.privacy.accounting import Accountant as Accountant
from fedrax.privacy.accounting import CohortSampling as CohortSampling
from fedrax.privacy.audit.bounds import (
    distinguish as distinguish,
)
from fedrax.privacy.audit.bounds import (
    epsilon_of_mu as epsilon_of_mu,
)
from fedrax.privacy.audit.bounds import (
    guess_membership as guess_membership,
)
from fedrax.privacy.audit.bounds import (
    one_run_epsilon as one_run_epsilon,
)
from fedrax.privacy.audit.bounds import (
    one_run_p_value as one_run_p_value,
)
from fedrax.privacy.audit.bounds import (
    provable_epsilon as provable_epsilon,
)
from fedrax.privacy.audit.bounds import (
    provable_one_run_epsilon as provable_one_run_epsilon,
)
from fedrax.privacy.audit.game import observe_client as observe_client
from fedrax.privacy.ledger import Ledger as Ledger
from fedrax.privacy.mechanisms.client_level import ClientDP as ClientDP
from fedrax.privacy.mechanisms.clipping import Adaptive as Adaptive
from fedrax.privacy.mechanisms.clipping import Flat as Flat
from fedrax.privacy.mechanisms.clipping import PerLeaf as PerLeaf
from fedrax.privacy.mechanisms.perturbation import (
    ObjectivePerturbation as ObjectivePerturbation,
)
from fedrax.privacy.mechanisms.perturbation import (
    OutputPerturbation as OutputPerturbation,
)
from fedrax.privacy.mechanisms.sample_level import SampleDP as SampleDP
from fedrax.privacy.releases import Release as Release
