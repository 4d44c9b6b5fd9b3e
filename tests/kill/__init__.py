"""Runs that are killed at any of their writes to disk.

``python -m tests.kill --runs 200`` kills processes by SIGKILL, SIGTERM, SIGHUP and SIGINT. The test suite restores the
files that exist after each write, as a kill would leave them, and resumes from there in its own process.
"""
