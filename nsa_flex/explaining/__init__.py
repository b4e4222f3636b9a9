"""`explain`: which backends and kernels a call runs, and why not better ones.

Which kernel follows which is written down nowhere else than where they are launched: `rehearsal`
runs a call on tensors that hold nothing, and notes the launches.
"""

from nsa_flex.explaining.explainer import explain
from nsa_flex.explaining.explanation import Explanation, KernelRun, Kernels

__all__ = ["Explanation", "KernelRun", "Kernels", "explain"]
