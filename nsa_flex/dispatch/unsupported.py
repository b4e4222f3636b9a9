"""What each backend cannot compute, and why: from shapes, dtypes and the device alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nsa_flex.backends.facts import BranchName, Facts
from nsa_flex.installed import HAS_TRITON
from nsa_flex.tuning import HOPPER_SHARED_MEMORY, shared_memory


def unsupported_reason(backend: str, branch: BranchName, facts: Facts) -> str | None:
    """Why `backend` cannot compute `branch`, or None."""
    return _REASONS[backend](branch, facts)


def decode_unsupported_reason(facts: Facts) -> str | None:
    """Why the decode kernels do not take few queries against a longer past; None if they do."""
    if facts.device_type != "cuda":
        return f"they need a CUDA device, got {facts.device_type}"
    if not HAS_TRITON:
        return "triton is not installed"
    if facts.needs_grad:
        return "they have no backward"
    if facts.documents:
        return "they take one document a row"
    return facts.decode_problem


def _dense(branch: BranchName, facts: Facts) -> str | None:
    return None


def _flex(branch: BranchName, facts: Facts) -> str | None:
    if facts.device_type == "cpu":
        return "FlexAttention has no backward on CPU" if facts.needs_grad else None
    if facts.dtype == torch.float64:
        return "FlexAttention's kernels take float32, bfloat16 and float16, got torch.float64"
    if min(facts.head_dim, facts.value_head_dim) < 16:
        return f"FlexAttention needs head dims of at least 16, got {_dims(facts)}"
    if branch == "selected" and facts.select_block_size < 16:
        # A block is one tile of keys, and Triton's matrix product takes no fewer than 16.
        return f"on CUDA it needs a select_block_size of 16 or more, got {facts.select_block_size}"
    return None


def _flash(facts: Facts) -> str | None:
    """What fused kernels outside FlexAttention ask for alike."""
    if facts.device_type != "cuda":
        return f"it needs a CUDA device, got {facts.device_type}"
    if not facts.half:
        return f"it needs float16 or bfloat16, got {facts.dtype}"
    if not facts.whole:
        return "it needs the queries to be all the tokens (query_offset 0, Sq = Sk)"
    if facts.documents:
        return "it cannot bound the keys a query (document_start)"
    return None


def _sdpa(branch: BranchName, facts: Facts) -> str | None:
    problem = _flash(facts)
    if problem is None and max(facts.head_dim, facts.value_head_dim) > 128:
        problem = _wide_sdpa(facts)
    if problem is None and (facts.head_dim % 8 or facts.value_head_dim % 8):
        problem = f"cuDNN needs head dims in multiples of 8, got {_dims(facts)}"
    return problem


def _wide_sdpa(facts: Facts) -> str | None:
    """Beyond 128, cuDNN's backward was tried with 192 and 128; its devices have such memory."""
    if (facts.head_dim, facts.value_head_dim) != (192, 128):
        return f"cuDNN's backward takes head dims up to 128, or 192 and 128, got {_dims(facts)}"
    if _shared_memory() < HOPPER_SHARED_MEMORY:
        return "cuDNN's backward takes head dims of 192 and 128 from Hopper on"
    return None


def _fa2(branch: BranchName, facts: Facts) -> str | None:
    problem = _flash(facts)
    if problem is None and facts.head_dim != facts.value_head_dim:
        problem = f"FA-2 needs equal key and value head dims, got {_dims(facts)}"
    if problem is None and (facts.head_dim % 8 or facts.head_dim > 256):
        problem = f"FA-2 needs a head dim that 8 divides, up to 256, got {facts.head_dim}"
    return problem


def _triton(branch: BranchName, facts: Facts) -> str | None:
    if facts.device_type != "cuda":
        return f"it needs a CUDA device, got {facts.device_type}"
    if not HAS_TRITON:
        return "triton is not installed"
    if facts.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it needs float16, bfloat16 or float32, got {facts.dtype}"
    if max(facts.head_dim, facts.value_head_dim) > 256:
        return f"it needs head dims up to 256, got {_dims(facts)}"
    return _selected(facts) if branch == "selected" else None


def _selected(facts: Facts) -> str | None:
    """What the selection kernels were not written for."""
    group = facts.group_size
    if group > 64:
        return f"it needs at most 64 query heads a KV head, got {group}"
    if facts.select_block_size not in (16, 32, 64, 128):
        return f"it needs a select_block_size of 16, 32, 64 or 128, got {facts.select_block_size}"
    if facts.num_selected_blocks > 128:
        return f"it needs at most 128 selected blocks, got {facts.num_selected_blocks}"
    if facts.dtype == torch.float32 and facts.head_dim > 128 and facts.select_block_size == 128:
        return "float32 tiles of 128 keys and such head dims do not fit shared memory"
    needed, given = selected_shared_bytes(facts), _shared_memory()
    if needed > given:
        return f"its tiles need {needed} bytes of shared memory, the device has {given}"
    return None


def selected_shared_bytes(facts: Facts) -> int:
    """Shared memory of the selection's smallest tiles: a block of keys and a token's rows.

    As `SelectedPlan.check_shared_memory` asks for, of a plan that is made from tensors.
    """
    size, rows = facts.select_block_size, max(16, _padded(facts.group_size))
    columns = _padded(facts.head_dim) + _padded(facts.value_head_dim)
    return ((size + rows) * columns + rows * size) * facts.dtype.itemsize + 1024


def _padded(number: int) -> int:
    """The least power of two that is not less, at least 16."""
    power = 16
    while power < number:
        power *= 2
    return power


def _shared_memory() -> int:
    if torch.compiler.is_compiling():
        from nsa_flex.device_constants import shared_memory_constant

        return shared_memory_constant()
    return shared_memory()


_REASONS: dict[str, Callable[[BranchName, Facts], str | None]] = {
    "dense": _dense,
    "flex": _flex,
    "sdpa": _sdpa,
    "fa2": _fa2,
    "triton": _triton,
}


def _dims(facts: Facts) -> str:
    return f"{facts.head_dim} and {facts.value_head_dim}"
