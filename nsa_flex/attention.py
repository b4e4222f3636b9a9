"""`nsa_attention`: the three branches, the choice of blocks and the gates as one function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_flex.backends import decode, fused
from nsa_flex.backends.branch import Branch, Inputs, known_offset, query_positions
from nsa_flex.config import BRANCHES, BranchName, NSAConfig
from nsa_flex.dispatch import (
    IMPLEMENTATIONS,
    Backend,
    choose_backends,
    is_decoded,
    is_fused,
)
from nsa_flex.inputs import check_documents, check_inputs, check_scale
from nsa_flex.installed import HAS_TRITON
from nsa_flex.selection import choose_blocks
from nsa_flex.sharded import refuse_context_parallel

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class BranchLSE(NamedTuple):
    """Natural log-sum-exp of each branch, float32 (B, Hq, Sq); -inf where nothing is seen.

    None of an absent branch.
    """

    compressed: Tensor | None
    selected: Tensor | None
    sliding: Tensor | None


class NSAAux(NamedTuple):
    """What `nsa_attention(..., return_aux=True)` adds. Neither carries gradients.

    blocks: int32 (B, Hkv, Sq, n), the chosen blocks, ascending, -1 where there are fewer than n;
        None without a selected branch.
    lse: log-sum-exp of each branch.
    """

    blocks: Tensor | None
    lse: BranchLSE


@overload
def nsa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor | None,
    compressed_value: Tensor | None,
    gates: Tensor,
    *,
    config: NSAConfig,
    scale: float | None = ...,
    backend: Backend = ...,
    sliding_key: Tensor | None = ...,
    sliding_value: Tensor | None = ...,
    query_offset: int | Tensor | None = ...,
    document_start: Tensor | None = ...,
    max_document_length: int | None = ...,
    return_aux: Literal[False] = ...,
) -> Tensor: ...


@overload
def nsa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor | None,
    compressed_value: Tensor | None,
    gates: Tensor,
    *,
    config: NSAConfig,
    scale: float | None = ...,
    backend: Backend = ...,
    sliding_key: Tensor | None = ...,
    sliding_value: Tensor | None = ...,
    query_offset: int | Tensor | None = ...,
    document_start: Tensor | None = ...,
    max_document_length: int | None = ...,
    return_aux: Literal[True],
) -> tuple[Tensor, NSAAux]: ...


def nsa_attention(
    query: Float[Tensor, "B Hq Sq D"],
    key: Float[Tensor, "B Hkv Sk D"],
    value: Float[Tensor, "B Hkv Sk Dv"],
    compressed_key: Float[Tensor, "B Hkv N D"] | None,
    compressed_value: Float[Tensor, "B Hkv N Dv"] | None,
    gates: Float[Tensor, "B Hq Sq C"],
    *,
    config: NSAConfig,
    scale: float | None = None,
    backend: Backend = "auto",
    sliding_key: Float[Tensor, "B Hkv Sk D"] | None = None,
    sliding_value: Float[Tensor, "B Hkv Sk Dv"] | None = None,
    query_offset: int | Int[Tensor, " B"] | None = None,
    document_start: Int[Tensor, "B Sq"] | None = None,
    max_document_length: int | None = None,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, NSAAux]:
    """Native Sparse Attention: `o_t = sum_c g_c * Attention_c(q_t)` over three branches c.

    Eq. 5 of arXiv 2502.11089 with the choice of Eq. 9 and 10; each branch has its own softmax,
    accumulated in float32. All tensors take any strides; memory ordered (B, S, H, D) is best.

    Args:
        query: (B, Hq, Sq, D); Hq is a multiple of Hkv.
        key: (B, Hkv, Sk, D), value: (B, Hkv, Sk, Dv), for the selected branch, and for the
            sliding one unless `sliding_key` and `sliding_value` are given.
        compressed_key: (B, Hkv, N, D), compressed_value: (B, Hkv, N, Dv): one a block of
            `compress_block_size` tokens, N = config.num_compressed_blocks(Sk). Where that is 0,
            one block that no query sees may stand in. None where nothing reads it: the values
            without a compressed branch, the keys without a selected one as well.
        gates: (B, Hq, Sq, C), of the C branches of the config in its order: compressed, selected,
            sliding.
        config: block sizes, counts, window and branches.
        scale: factor of query . key, by default 1 / sqrt(D).
        backend: "auto", one backend, or a mapping from branch to backend; see `explain`.
        query_offset: key index of query 0, an int or int (B,); by default Sk - Sq. Keys after a
            query are never seen, so that Sk may be the length of a larger static cache; but unless
            on CUDA they must be finite.
        document_start: int (B, Sq), key index of the first token of each query's document, a
            multiple of `select_block_size`; see `nsa_flex.documents` for packed and padded rows.
        max_document_length: tokens of the longest of these documents, where the host knows. Up to
            n * l' every query selects every block, so that nothing is scored. Where kernels rely
            on it, a longer document raises an error on the device (an assertion that the host does
            not wait for).
        return_aux: also return the chosen blocks and the log-sum-exps.

    Returns:
        (B, Hq, Sq, Dv) in the query's dtype (under autocast that of PyTorch's operations, where
        they compute it), and an `NSAAux` if asked. A query that sees no compressed block
        (t < l - 1) gets 0 from that branch, with zero gradients.

    Raises:
        TypeError: an input that is no tensor, or a max_document_length that is no int.
        ValueError: shapes, head counts, dtypes or devices that do not fit together, a backend
            that cannot compute what was asked of it, or a call inside torch's `context_parallel`.

    >>> q, k, v = (torch.randn(1, heads, 128, 16) for heads in (4, 2, 2))
    >>> ck, cv = (x.unfold(2, 32, 16).mean(-1) for x in (k, v))
    >>> nsa_attention(q, k, v, ck, cv, torch.ones(1, 4, 128, 3), config=NSAConfig()).shape
    torch.Size([1, 4, 128, 16])
    """
    refuse_context_parallel()
    inputs = Inputs(
        query,
        key,
        value,
        *with_stand_ins(config, key, value, compressed_key, compressed_value),
        key if sliding_key is None else sliding_key,
        value if sliding_value is None else sliding_value,
        gates,
    )
    if (sliding_key is None) != (sliding_value is None):
        raise ValueError("sliding_key and sliding_value must be given together")
    check_inputs(inputs, config, query_offset, document_start)
    check_documents(document_start, max_document_length)
    first = known_offset(query, key, query_offset)
    inputs = inputs.seen(config, query_offset, inputs.need_grad())
    key, value = inputs.key, inputs.value
    facts = inputs.facts(config, query_offset, document_start)
    choices = choose_backends(facts, backend)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    check_scale(scale)
    compressed_key, compressed_value = (
        F.pad(x, (0, 0, 0, 1)) if x.shape[2] == 0 else x
        for x in (inputs.compressed_key, inputs.compressed_value)
    )

    tensors = inputs._replace(compressed_key=compressed_key, compressed_value=compressed_value)

    if is_decoded(facts, backend):
        out, aux = decode.attend(tensors, config, scale, query_offset, return_aux=return_aux)
        return out if aux is None else (out, aux_of_kernels(aux.blocks, aux.lse, config))

    if is_fused(choices, facts):
        core = fused.attend(
            tensors,
            config,
            scale,
            document_start,
            max_document_length,
            return_blocks=return_aux,
            query_offset=None if facts.whole or facts.needs_grad else first,
        )
        if not return_aux:
            return core.out
        found: list[Any] = list(core[1:])  # none of it None, since it was asked for
        return core.out, NSAAux(found[0], BranchLSE(*found[1:]))

    offset, positions = query_positions(query, key, query_offset)

    def run(branch: BranchName, k: Tensor, v: Tensor, blocks: Tensor | None = None):
        # On CUDA the compressed branch lends its log-sum-exp to the choice of blocks.
        need_lse = return_aux or (branch == "compressed" and query.device.type == "cuda")
        task = Branch(
            *(query, k, v, config, scale),
            offset=offset,
            known_offset=first,
            document_start=document_start,
            blocks=blocks,
            need_lse=need_lse,
        )
        return IMPLEMENTATIONS[choices[branch].backend, branch](task)

    results: dict[BranchName, tuple[Tensor, Tensor | None]] = {}
    if config.has("compressed"):
        results["compressed"] = run("compressed", compressed_key, compressed_value)
    blocks = None
    if config.has("selected"):
        # `dense` rounds its scores to the inputs' dtype: too coarse for a choice.
        lends = "compressed" in results and choices["compressed"].backend != "dense"
        blocks = choose_blocks(
            query,
            compressed_key,
            config=config,
            scale=scale,
            num_blocks=config.num_select_blocks(key.shape[2]),
            positions=positions,
            document_start=document_start,
            lse=results["compressed"][1] if lends else None,
        )
        results["selected"] = run("selected", key, value, blocks)
    if config.has("sliding"):
        results["sliding"] = run("sliding", inputs.sliding_key, inputs.sliding_value)
    out = gated_sum([out for out, _ in results.values()], gates)
    if not return_aux:
        return out
    told = {name: lse.detach() for name, (_, lse) in results.items() if lse is not None}
    return out, NSAAux(blocks, BranchLSE(*map(told.get, BRANCHES)))


def aux_of_kernels(blocks: Tensor, lse: Tensor, config: NSAConfig) -> NSAAux:
    """From what the decode kernels give: `blocks`, and `lse` (B, Hq, T, C) of C branches."""
    found: Any = dict(zip(config.branches, lse.unbind(-1), strict=True))
    return NSAAux(blocks if config.has("selected") else None, BranchLSE(*map(found.get, BRANCHES)))


def with_stand_ins(
    config: NSAConfig,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor | None,
    compressed_value: Tensor | None,
) -> tuple[Any, Any]:
    """Compressed keys and values, without memory of their own where nothing reads them.

    Raises:
        TypeError: None, where a branch reads it.
    """
    found = {"compressed_key": compressed_key, "compressed_value": compressed_value}
    if all(x is not None for x in found.values()) or not isinstance(config, NSAConfig):
        return compressed_key, compressed_value
    reads = {
        "compressed_key": config.compresses,
        "compressed_value": config.has("compressed"),
    }
    for (name, given), source in zip(found.items(), (key, value), strict=True):
        if given is None and reads[name]:
            branches = ", ".join(config.branches)
            raise TypeError(f"{name} is None, and is read by one of the branches {branches}")
        if given is None and isinstance(source, Tensor) and source.dim() == 4:
            batch, heads, tokens, dim = source.shape
            rows = config.num_compressed_blocks(tokens)
            rows = rows if compressed_key is None else compressed_key.shape[2]
            found[name] = source.new_empty(()).expand(batch, heads, rows, dim)
    return found["compressed_key"], found["compressed_value"]


def gated_sum(outputs: list[Tensor], gates: Tensor) -> Tensor:
    """Gated sum of the branches in float32 or better: one pass over memory."""
    on_kernel = gates.device.type == "cuda" and HAS_TRITON and len(outputs) == len(BRANCHES)
    if on_kernel and outputs[0].dtype != torch.float64:
        from nsa_flex.fallback_kernels.fused import gated_sum as kernel

        return kernel.gated_sum(outputs[0], outputs[1], outputs[2], gates)
    precision = torch.promote_types(outputs[0].dtype, torch.float32)
    gate = gates.to(precision)
    first, *rest = (out.to(precision) * gate[..., c, None] for c, out in enumerate(outputs))
    return sum(rest, first).to(outputs[0].dtype)
