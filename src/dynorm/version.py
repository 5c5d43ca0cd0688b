"""The version, which the build and saved folders read."""

__version__ = "0.1.0"
