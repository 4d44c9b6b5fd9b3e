from fedrax.flower.client import client_app as client_app
from fedrax.flower.deployment import Deployment as Deployment
from fedrax.flower.local_grid import LocalGrid as LocalGrid
from fedrax.flower.server import federate as federate
from fedrax.flower.server import server_app as server_app
