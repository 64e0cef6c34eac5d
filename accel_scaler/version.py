"""The version, where the build and the telemetry file find it."""

__version__ = "0.1.0"
