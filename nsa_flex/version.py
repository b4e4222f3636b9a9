"""The version, for those that `nsa_flex` itself imports."""

__version__ = "0.1.0"
