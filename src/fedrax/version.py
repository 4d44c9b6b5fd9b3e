"""The version, which is written into run directories and reports."""

VERSION = "0.1.0"
