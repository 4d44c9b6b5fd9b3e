"""Real federations: the algorithms of this package on Flower's servers and clients.

What was simulated is deployed unchanged: :func:`client_app` and :func:`server_app` take the same algorithm and task as
``fedrax.simulate``. Needs ``fedrax[flower]``.
"""

from fedrax.flower.client import client_app
from fedrax.flower.local_grid import LocalGrid
from fedrax.flower.server import federate, server_app

__all__ = ["LocalGrid", "client_app", "federate", "server_app"]
