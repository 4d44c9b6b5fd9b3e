"""Data sets, their partition over clients, and federations: NumPy arrays in host memory.

Data flows one way: `load` (or a reader) gives a `Dataset`, a partition such as `DirichletClients` divides its training
rows over clients, and `Federation.from_dataset` groups the rows by client for `fedrax.simulate`. Arrays that are at
hand become a federation by `Federation.from_arrays`.
"""

from fedrax.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
