"""Conformance: what a patched model must keep, tried on any model that a user brings.

And whether ranks that share sequences attend what the others have: `check_ranks`.
"""

from nsa_flex.testing.ranks import check_ranks
from nsa_flex.testing.run import CHECKS, Check, ConformanceReport, check_model

__all__ = ["CHECKS", "Check", "ConformanceReport", "check_model", "check_ranks"]
