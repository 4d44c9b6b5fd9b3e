"""Random inputs: each is rejected with a FedraxError or keeps its meaning.

``python -m tests.fuzz configurations 2000`` (or arrays, files, runs) tries this number of cases; the test suite tries a
few hundred of each kind.
"""
