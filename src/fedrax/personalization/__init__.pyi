from fedrax.personalization.ditto import Ditto as Ditto
from fedrax.personalization.personal_layers import Personalized as Personalized
