"""The attention core as one custom operator, and one or two for its backward.

One operator fixes order and memory as no composition of operators can: the fold is never copied,
no gradient is multiplied by a gate, and the branches add their shares of dQ into one tensor.

An operator's tensors live until it returns. Outputs of branches are as large as the queries, and
a long backward needs two of the three for its gates alone. In two steps these are an operator by
themselves, and the memory is free before the next one, in eager and in compiled code. In graphs of
`any_length` the two operators return tensors of the same shapes whatever the route; kernels of
short rows need the gradient itself, of which the first one returns a copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.fused.backward import (
    Kept,
    Short,
    any_stats,
    backward_kinds,
    run_backward,
    run_branches_backward,
    run_first_of_any_length,
    run_gates_backward,
    run_second_of_any_length,
    run_short_backward,
)
from nsa_flex.fallback_kernels.fused.bwd_gates import SumGradients, num_stats
from nsa_flex.fallback_kernels.fused.forward import (
    forward_kinds,
    run_forward,
    run_short_forward,
)
from nsa_flex.fallback_kernels.fused.route import (
    BackwardRoute,
    backward_route_of,
    compressed_kernels,
    is_of_any_length,
    is_one_operator,
    offsets_of,
    past_keys,
    rounded_length,
    route_of,
    rows_kept,
)
from nsa_flex.fallback_kernels.launch.direct import directly
from nsa_flex.fallback_kernels.launch.plans import planned
from nsa_flex.fallback_kernels.selected.config import index_words
from nsa_flex.fallback_kernels.short.bwd_dq import empty_masked_stats, with_padding


class CoreResults(NamedTuple):
    """What `core_attention` returns; only `out` carries gradients."""

    out: Tensor  # (B, Hq, S, Dv)
    blocks: Tensor | None  # int32 (B, Hkv, S, n); None if they were not asked for, as the others
    compressed_lse: Tensor | None  # float32 (B, Hq, S), as the next two
    selected_lse: Tensor | None
    sliding_lse: Tensor | None


def core_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    sliding_key: Tensor,
    sliding_value: Tensor,
    gates: Tensor,
    *,
    config: NSAConfig,
    scale: float,
    document_start: Tensor | None = None,
    max_document_length: int | None = None,
    return_blocks: bool = True,
    query_offset: int | None = None,
) -> CoreResults:
    """All of `nsa_attention` where the queries are all the tokens of a row, or at an offset.

    Without `query_offset` the queries are the last S of Sk keys.

    Args:
        query: (B, Hq, S, D), float16 or bfloat16 on CUDA, D and Dv multiples of 8 up to 128, or
            192 and 128 from Hopper on; with documents or an offset float32 too, and up to 256.
            Memory ordered (B, S, H, D) is taken as it is, other memory is copied.
        key, value, sliding_key, sliding_value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv).
        compressed_key, compressed_value: (B, Hkv, N, D) and (B, Hkv, N, Dv), N at least 1.
        gates: (B, Hq, S, 3), any float dtype and strides.
        scale: factor of query . key.
        document_start: int32 (B, S), contiguous, key index of the first token of each query's
            document, a multiple of l'; None where each row is one document.
        max_document_length: tokens of the longest of these documents, if known. Up to n * l' every
            query selects every block, and other kernels run.
        return_blocks: whether the selected blocks and the log-sum-exps are wanted.
        query_offset: key index of query 0. Then keys may hold anything after the last query, and
            there are neither documents nor gradients. None: Sk - S.

    Returns:
        `CoreResults`. Differentiable once, in all tensors. Sums are float32; the backward of the
        selected branch adds into dK and dV by float32 atomics unless
        `torch.are_deterministic_algorithms_enabled()`.
    """
    tensors = (query, key, value, compressed_key, compressed_value, gates)
    # Which keys are the same is told apart where the operator is called, not by what memory holds.
    shared = sliding_key is key and sliding_value is value
    own = (None, None) if shared else (sliding_key, sliding_value)
    if past_keys(query, key) > 0:
        max_document_length = None  # kernels that rely on it take whole rows
    if max_document_length is not None:
        max_document_length = rounded_length(max_document_length, config)
    needs_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*tensors, *own)
    )
    offsets = None
    if query_offset is not None:
        assert document_start is None
        assert not needs_grad
        # On the device, where each KV head reads its own: one launch plan serves all offsets.
        offsets = torch.full(key.shape[:2], query_offset, dtype=torch.int32, device=query.device)
    arguments = (
        *(*tensors, *own, scale, config.counts, needs_grad),
        *(torch.are_deterministic_algorithms_enabled(), document_start, max_document_length),
        return_blocks,
        offsets,
    )
    if not return_blocks:
        return CoreResults(_core_output(*arguments).transpose(1, 2), None, None, None, None)
    out, blocks, _, compressed_lse, _, selected_lse, _, sliding_lse, _ = _core(*arguments)
    return CoreResults(
        out.transpose(1, 2),
        blocks,
        compressed_lse,
        selected_lse.transpose(1, 2),
        sliding_lse.transpose(1, 2),
    )


@torch.library.custom_op("nsa_flex::core_forward", mutates_args=())
@planned
def core_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    sliding_key: Tensor | None,
    sliding_value: Tensor | None,
    scale: float,
    counts: list[int],
    differentiable: bool,
    deterministic: bool,
    document_start: Tensor | None = None,
    max_document_length: int | None = None,
    return_blocks: bool = True,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, blocks, output and log-sum-exp of each branch, and the index of the selection.

    Outputs are (B, S, H, D), contiguous, log-sum-exps (B, S, H), that of the compressed branch (B,
    H, S), with documents in (B, S, H) memory. What only a backward wants is empty unless the call
    is `differentiable`: the index and the outputs of the branches. `deterministic` is for the
    backward. Without keys and values of its own the sliding branch has the selected one's.
    `counts` are an `NSAConfig`'s, `document_start` and `max_document_length` are what
    `core_attention` takes. Without `return_blocks` the blocks are undefined. `offsets`: int32
    (B, Hkv), contiguous, key index of each row's query 0, in [0, Sk - S], without gradients;
    None: Sk - S.
    """
    tensors = (query, key, value, compressed_key, compressed_value, gates)
    own = None
    if sliding_key is not None and sliding_value is not None:
        own = (sliding_key, sliding_value)
    config = NSAConfig.of_counts(counts)
    call = (tensors, own, document_start, config, scale, differentiable)
    with torch.cuda.device_of(query):
        # Asked in the operators, where lengths are numbers: outside, each would be a guard.
        route = route_of(
            query,
            key,
            value,
            config,
            documents=document_start is not None,
            max_document_length=max_document_length,
            differentiable=differentiable,
            has_offset=offsets is not None,
            own_window_keys=own is not None,
        )
        kinds = forward_kinds(document_start, config, route)
        if offsets is None:
            offsets = offsets_of(query, key)
        if route.forward == "short":
            return run_short_forward(*call, return_blocks)
        return run_forward(*call, route, kinds, offsets)


def _backward_route(
    inputs: list[Tensor],
    counts: list[int],
    document_start: Tensor | None,
    max_document_length: int | None = None,
) -> BackwardRoute:
    query, key, value = inputs[:3]
    return backward_route_of(
        *(query, key, value),
        NSAConfig.of_counts(counts),
        document_start is not None,
        max_document_length,
    )


@core_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    sliding_key: Tensor | None,
    sliding_value: Tensor | None,
    scale: float,
    *options: Any,
) -> tuple[Tensor, ...]:
    batch, heads, tokens, _ = query.shape
    dim = value.shape[3]
    counts, differentiable, _, *others = options
    document_start = others[0] if others else None
    config = NSAConfig.of_counts(counts)
    shape = (batch, key.shape[1], tokens, config.num_selected_blocks)
    blocks = query.new_empty(shape, dtype=torch.int32)
    words = index_words(query, value, blocks, config.select_block_size, past_keys(query, key))
    branch = (batch, tokens, heads, dim)

    def lse(*shape: Any) -> Tensor:
        return query.new_empty(shape, dtype=torch.float32)

    return (
        query.new_empty(branch),
        blocks,
        query.new_empty(branch if differentiable else 0),
        lse(batch, heads, tokens) if document_start is None else lse(*branch[:3]).transpose(1, 2),
        query.new_empty(branch if differentiable else 0),
        lse(*branch[:3]),
        query.new_empty(branch if differentiable else 0),
        lse(*branch[:3]),
        query.new_empty(words if differentiable else 0, dtype=torch.int32),
    )


@torch.library.custom_op("nsa_flex::core_backward", mutates_args=())
@planned
def core_backward(
    grad: Tensor,
    inputs: list[Tensor],
    results: list[Tensor],
    scale: float,
    counts: list[int],
    deterministic: bool,
    document_start: Tensor | None = None,
    max_document_length: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the eight tensors that `core_forward` takes, tokens or blocks before heads.

    Empty for what it did not get.

    Args:
        grad: (B, S, Hq, Dv), gradient of the first result.
        inputs: the six tensors, or all eight.
        results: all but the first.
        counts: `NSAConfig.counts`.
        document_start, max_document_length: as the forward had them.
    """
    config = NSAConfig.of_counts(counts)
    with torch.cuda.device_of(grad):
        route = _backward_route(inputs, counts, document_start, max_document_length)
        call = (grad, inputs, results, document_start, scale, config)
        if route.kernels != "lists":
            return run_short_backward(*call, route)
        return run_backward(*call, deterministic, route)


@core_backward.register_fake
def _(
    grad: Tensor, inputs: list[Tensor], results: list[Tensor], *_options: Any
) -> tuple[Tensor, ...]:
    query, key, value, compressed_key, compressed_value, gates, *own = inputs
    return (
        *(_empty_bshd(x) for x in (query, key, value, compressed_key, compressed_value, gates)),
        *((_empty_bshd(x) for x in own) if own else (grad.new_empty(0), grad.new_empty(0))),
    )


@torch.library.custom_op("nsa_flex::core_backward_gates", mutates_args=())
@planned
def core_backward_gates(
    grad: Tensor,
    inputs: list[Tensor],
    results: list[Tensor],
    scale: float,
    counts: list[int],
    document_start: Tensor | None,
    max_document_length: int | None = None,
    any_length: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the gates, `SumGradients.signed` and its `stats`, and both of `Short`.

    The latter are empty where no document can be short. Arguments as of `core_backward`. With
    `any_length`, without documents and where D is Dv, what `run_first_of_any_length` returns, and
    an empty tensor.
    """
    config = NSAConfig.of_counts(counts)
    with torch.cuda.device_of(grad):
        route = _backward_route(inputs, counts, document_start, max_document_length)
        empty = grad.new_empty(0), grad.new_empty(0, dtype=torch.float32)
        if any_length:
            first_of_any = run_first_of_any_length(grad, inputs, results, scale, config, route)
            return *first_of_any, empty[1]
        first = run_gates_backward(grad, inputs, results, document_start, scale, config, route)
        if first.short is None:
            grad_query, short_stats = empty
        else:
            grad_query, short_stats = first.short.query, with_padding(first.short.stats)
    return first.gates, first.sums.signed, first.sums.stats, grad_query, short_stats


@core_backward_gates.register_fake
def _(
    grad: Tensor,
    inputs: list[Tensor],
    results: list[Tensor],
    scale: float,
    counts: list[int],
    document_start: Tensor | None,
    max_document_length: int | None = None,
    any_length: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, *_, gates = inputs[:6]
    batch, heads, tokens, _ = query.shape
    if any_length:
        config = NSAConfig.of_counts(counts)
        kept = grad.new_empty((batch, rows_kept(tokens, config), heads, grad.shape[3]))
        empty = grad.new_empty(0, dtype=torch.float32)
        return _empty_bshd(gates), grad.new_empty(grad.shape), any_stats(query), kept, empty
    route = _backward_route(inputs, counts, document_start, max_document_length)
    stats = (num_stats(results[2] if route.compressed == "ranges" else None), *grad.shape[:3])
    grad_query, short_stats = grad.new_empty(0), grad.new_empty(0, dtype=torch.float32)
    if route.short_documents:
        grad_query = _empty_bshd(query)
        short_stats = with_padding(empty_masked_stats(batch, heads, tokens, query.device))
    return (
        _empty_bshd(gates),
        grad.new_empty(grad.shape),
        grad.new_empty(stats, dtype=torch.float32),
        grad_query,
        short_stats,
    )


@torch.library.custom_op("nsa_flex::core_backward_branches", mutates_args=("signed", "grad_query"))
@planned
def core_backward_branches(
    signed: Tensor,
    stats: Tensor,
    grad_query: Tensor | None,
    short_stats: Tensor | None,
    grad: Tensor | None,
    inputs: list[Tensor],
    blocks: Tensor,
    compressed: Tensor | None,
    compressed_lse: Tensor,
    selected_lse: Tensor,
    sliding_lse: Tensor,
    index: Tensor,
    scale: float,
    counts: list[int],
    deterministic: bool,
    document_start: Tensor | None,
    max_document_length: int | None = None,
    any_length: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the tensors that `core_forward` takes, but for the gates; else `core_backward`.

    Args:
        signed, stats: what `core_backward_gates` gave.
        grad_query, short_stats: this, too, or None where it is empty. The query's gradient is
            completed there, and the first result is empty then.
        grad: as there, if its memory is there anyway; None if `signed` is all there is of it,
            which it may not be where documents may be short.
        compressed: of `core_forward`, as the next; None where range attention runs.
        any_length: as there; `signed` may be dQ, and then `grad` is what is kept of the gradient.
    """
    grad = None if grad is None else grad.contiguous()
    config = NSAConfig.of_counts(counts)
    kept = Kept(blocks, compressed, compressed_lse, selected_lse, sliding_lse, index)
    route = _backward_route(inputs, counts, document_start, max_document_length)
    with torch.cuda.device_of(signed):
        if any_length:
            assert grad is not None
            return run_second_of_any_length(
                grad, signed, stats, inputs, kept, scale, config, deterministic, route
            )
        short = None
        kinds = backward_kinds(document_start, config, route)
        if grad_query is not None and short_stats is not None and kinds is not None:
            short = Short(grad_query, short_stats[..., : inputs[0].shape[2]], kinds)
        call = (inputs, kept, document_start, scale, config, deterministic, route, short)
        grads = run_branches_backward(grad, SumGradients(signed, stats), *call)
    return grads if short is None else (signed.new_empty(0), *grads[1:])


@core_backward_branches.register_fake
def _(
    signed: Tensor,
    stats: Tensor,
    grad_query: Tensor | None,
    short_stats: Tensor | None,
    grad: Tensor | None,
    inputs: list[Tensor],
    *_others: Any,
) -> tuple[Tensor, ...]:
    tensors, own = inputs[:5], inputs[6:]
    grads = [_empty_bshd(x) for x in tensors]
    if grad_query is not None:
        grads[0] = signed.new_empty(0)
    return (
        *grads,
        *((_empty_bshd(x) for x in own) if own else (signed.new_empty(0), signed.new_empty(0))),
    )


def _empty_bshd(x: Tensor) -> Tensor:
    """New (B, S, H, D) memory for the gradient of (B, H, S, D)."""
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.scale, ctx.counts, _, ctx.deterministic, document_start, ctx.longest, *_ = inputs[8:]
    tensors = tuple(x for x in inputs[:8] if x is not None)
    ctx.num_tensors = len(tensors)
    ctx.save_for_backward(*tensors, *output[1:], document_start)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_others: Any) -> tuple[Tensor | None, ...]:
    options = (None,) * 8
    if grad is None:
        return *(None,) * 8, *options
    *saved, document_start = ctx.saved_tensors
    inputs, results = saved[: ctx.num_tensors], saved[ctx.num_tensors :]
    del saved
    of_call = (ctx.scale, ctx.counts, ctx.deterministic, document_start)
    config = NSAConfig.of_counts(ctx.counts)
    documents = document_start is not None
    query, key, value = inputs[:3]
    any_length = is_of_any_length(query, value, config, documents)
    if not any_length and is_one_operator(query, key, value, config, documents, ctx.longest):
        grads = _core_gradients(grad, inputs, results, *of_call, ctx.longest)
    else:
        # From here on, what is deleted is freed, unless the graph is retained.
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()
        grad_gates, signed, stats, *short = _gate_gradients(
            *(grad, inputs, results, ctx.scale, ctx.counts, document_start, ctx.longest),
            any_length,
        )
        blocks, compressed, *others, index = results
        compressed_lse, selected_lse, sliding_lse = others[::2]
        tensors = query, key, value
        del results, others
        if not any_length and compressed_kernels(*tensors, config, documents) == "ranges":
            compressed = None
        # Kernels of two kinds read the gradient where documents may be short.
        is_read_twice = not any_length and short[0].numel() > 0
        if not is_read_twice and not _is_held(grad):
            grad = None
        of_branches = _branch_gradients(
            *(signed, stats, *(short if is_read_twice else (None, None))),
            *(short[0] if any_length else grad, inputs),
            *(blocks, compressed, compressed_lse, selected_lse, sliding_lse, index, *of_call),
            ctx.longest,
            any_length,
        )
        of_query = short[0] if is_read_twice else of_branches[0]
        grads = of_query, *of_branches[1:5], grad_gates, *of_branches[5:]
    return *(x.transpose(1, 2) if x.dim() > 1 else None for x in grads), *options


def _is_held(grad: Tensor) -> bool:
    """Whether the memory of a gradient, as kernels read it, is there whoever uses it.

    Autograd holds what it was given. Compiled code, for which this is traced with tensors of
    other types, frees what it does not use again.
    """
    is_traced = torch.compiler.is_compiling() or type(grad) is not Tensor
    return grad.is_contiguous() and not is_traced


core_forward.register_autograd(_differentiate, setup_context=_save)
_core = directly(core_forward, _save, _differentiate)
_core_output = directly(core_forward, _save, _differentiate, first=True)
_core_gradients = directly(core_backward)
_gate_gradients = directly(core_backward_gates)
_branch_gradients = directly(core_backward_branches)
