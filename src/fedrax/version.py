"""The version, which runs and reports keep."""

VERSION = "0.1.0"
