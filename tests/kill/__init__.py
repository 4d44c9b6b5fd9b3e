"""Runs that end in the middle of a write, at every one of them.

``python -m tests.kill --runs 200`` kills processes by SIGKILL, SIGTERM, SIGHUP and SIGINT. The test suite looks at what
each write leaves on disk, which is what a kill would leave, and goes on from there in its own process.
"""
