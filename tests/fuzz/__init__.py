"""What nobody would type, by the hundred: a sentence or what was meant, and never anything else.

``python -m tests.fuzz configurations 2000`` (or arrays, files, runs) tries as many as it is told to; the test suite
tries a few hundred of each.
"""
