"""Conformance: what a patched model must keep, tried on any model that a user brings."""

from nsa_flex.testing.run import CHECKS, Check, ConformanceReport, check_model

__all__ = ["CHECKS", "Check", "ConformanceReport", "check_model"]
