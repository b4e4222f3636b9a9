"""The sliding and the folded compressed branch on FA-2 varlen kernels."""

from __future__ import annotations

from torch import Tensor

from nsa_flex.backends.branch import Branch
from nsa_flex.backends.fold import fold_queries, repeat_keys, unfold_outputs

Output = tuple[Tensor, Tensor | None]


def sliding(branch: Branch) -> Output:
    """Branch 3: full keys and values with a window, not chunks of them."""
    return _attend(branch, branch.query, branch.key, branch.value, branch.config.window_size)


def compressed(branch: Branch) -> Output:
    """Branch 1 through the fold: plain causal attention."""
    config, num_tokens = branch.config, branch.query.shape[2]
    folded = fold_queries(branch.query, branch.key.shape[2], config)
    key, value = (repeat_keys(x, config) for x in (branch.key, branch.value))
    out, lse = _attend(branch, folded, key, value, None)
    out = unfold_outputs(out, num_tokens, config, 0.0)
    if lse is not None:
        lse = unfold_outputs(lse, num_tokens, config, float("-inf"))
    return out, lse


def _attend(
    branch: Branch, query: Tensor, key: Tensor, value: Tensor, window_size: int | None
) -> Output:
    # Here, because it loads the compiler: `import nsa_flex` should not.
    from nsa_flex.fallback_kernels.sliding.fa2_varlen import fa2_window, varlen_attention

    window = (-1, 0) if window_size is None else fa2_window(window_size)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = varlen_attention(
        q, k, v, window=window, scale=branch.scale, need_lse=branch.need_lse
    )
    return out.transpose(1, 2), lse
