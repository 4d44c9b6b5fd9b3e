"""Deployment on Flower: the algorithms of this package on real servers and clients.

:func:`client_app` and :func:`server_app` take the same algorithm and task as ``fedrax.simulate``. Needs
``fedrax[flower]``.
"""

from fedrax.flower.client import client_app
from fedrax.flower.local_grid import LocalGrid
from fedrax.flower.server import federate, server_app

__all__ = ["LocalGrid", "client_app", "federate", "server_app"]
