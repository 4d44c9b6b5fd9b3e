"""Deployment on Flower: the algorithms of this package on real servers and clients.

:func:`client_app` and :func:`server_app` take the same algorithm and task as ``fedrax.simulate``. Needs
``fedrax[flower]``.
"""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
