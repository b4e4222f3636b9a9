"""What a patched decoder refuses by name, since NSA would ignore it or mix documents.

A patched layer computes causal attention over the keys and values of its documents, and nothing
else. Checked at every call, from names, shapes and identity of objects: no tensor is read.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from nsa_flex.parallel.heads import HeadShards
from nsa_flex.patching.hf_layers import Decoder, is_recurrent
from nsa_flex.patching.layer import AttentionShape
from nsa_flex.patching.rows import CallContext, Rows

# Whoever passes them, they ask for more than softmax(scale * q k) v over all earlier keys.
_REFUSED = {
    "softcap": "logit soft-capping",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "alibi": "a position bias",
    "score_mod": "a score modification",
    "block_mask": "a mask of its own",
    "indices": "keys chosen by an indexer",
    "topk_indices": "keys chosen by an indexer",
    "block_indices": "keys chosen by an indexer",
}

# What callers may say of documents by names of these kinds, and what the hook itself adds.
_BOUNDS = {"cu_seq_lens_k", "cu_seq_lens_q", "nsa_call", "nsa_max_documents"}

# What layers add to the arguments of their decoder, and attention functions need not look at.
_HARMLESS = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "is_causal",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "sliding_window",
    "use_cache",
}


def refuse_unknown_bounds(call: dict[str, Any]) -> None:
    """ValueError for a name like those that bound documents and is none: the rows would mix."""
    for name, value in call.items():
        if value is not None and name.startswith(("nsa_", "cu_seq")) and name not in _BOUNDS:
            raise ValueError(
                f"{name} is read by no patched layer; documents come as position_ids that restart "
                "(nsa_max_documents) or as cu_seq_lens_q"
            )


def check_arguments(
    name: str, dropout: float, arguments: dict[str, Any], context: CallContext
) -> None:
    """Keyword arguments of an attention function.

    What the caller of the decoder passed goes down to attention whatever it is, and is harmless
    unless known to be refused. What layers add must be known to be harmless.

    Raises:
        ValueError: dropout is not 0, or an argument would change what attention computes.
    """
    if dropout:
        raise ValueError(
            f"attention dropout is not supported, got {dropout}: set attention_dropout of the "
            "attention modules (and of the config) to 0, or call model.eval()"
        )
    if arguments.get("is_causal") is False:
        raise ValueError("is_causal=False is not supported: NSA is causal attention")
    for argument, value in arguments.items():
        if value is None:
            continue
        if argument in _REFUSED:
            raise ValueError(
                f"{_REFUSED[argument]} ({argument}) is not something that NSA computes"
            )
        if argument not in _HARMLESS and argument not in context.passed:
            raise ValueError(
                f"{name} passes {argument} to its attention, which NSA would ignore: leave such "
                "layers out with filter_fn, or register an adapter (nsa_flex.register_adapter)"
            )


def check_mask(name: str, mask: Any, given: Any, *, full: bool) -> None:
    """The mask that attention got, against the one that the module was given.

    Args:
        mask: what the module passes to attention.
        given: what it was called with; padding (B, keys) or None, as `mask_for_attention` makes it
            for patched layers.
        full: whether masks are those of the former implementation: (B or 1, 1, queries, keys).

    Raises:
        ValueError: the module or its decoder changed the mask, so that it may say more than
            causality and padding.
    """
    if mask is not given:
        raise ValueError(
            f"{name} makes an attention mask of its own, which NSA would ignore: leave such "
            "layers out with filter_fn"
        )
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        return
    if full and isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] == 1:
        return
    raise ValueError(
        f"{name} was given an attention mask of shape {tuple(getattr(mask, 'shape', ()))}; "
        "expected padding (batch, keys): a mask that its decoder adds to is something that NSA "
        "would ignore"
    )


def check_window(name: str, window: int | None, config: Any) -> None:
    """ValueError if the layer limits its context and its config did not tell `patch` so."""
    if window is None or window >= getattr(config, "max_position_embeddings", float("inf")):
        return
    raise ValueError(
        f"{name} sees a limited context (sliding_window={window}), which NSA would widen: leave "
        "such layers out with filter_fn"
    )


def check_tokens(name: str, query: Tensor, key: Tensor, rows: Rows) -> None:
    """Queries and keys against the layout of padding or documents that the decoder's call has.

    Raises:
        ValueError: the layer attends other tokens than its decoder got.
    """
    for kind, layout, x in (("queries", rows.queries, query), ("keys", rows.keys, key)):
        if layout is None:
            continue
        expected, found = tuple(layout.target.shape), (x.shape[0], x.shape[2])
        if expected != found:
            raise ValueError(
                f"{name} attends {kind} (batch, tokens) {found}, but the call of its decoder has "
                f"{expected}: NSA cannot tell padding and documents among others"
            )


def check_heads(
    name: str, query: Tensor, key: Tensor, shape: AttentionShape, shards: HeadShards | None
) -> None:
    """Queries and keys against the layer, whose heads may be split over ranks since `patch`.

    Args:
        name: the module's type.
        query, key: (B, H, S, D).
        shape: of the layer.
        shards: the ranks that share heads in this call.

    Raises:
        ValueError: they have other numbers of heads.
    """
    ranks = 1 if shards is None else shards.size
    found = (query.shape[1], key.shape[1])
    expected = (shape.num_query_heads // ranks, shape.num_kv_heads // ranks)
    if found != expected:
        raise ValueError(
            f"{name} attends {found[0]} query and {found[1]} KV heads, and its layer has "
            f"{expected[0]} and {expected[1]}: something split heads over ranks and its NSA "
            "layer does not know; call nsa_flex.tensor_parallel(model, mesh) after a "
            "tensor-parallel plan (parallelize_module), nsa_flex.sequence_parallel(model, mesh) "
            "for Ulysses sequence parallelism, or leave the attention layers out"
        )


def check_mask_kept(name: str, call: dict[str, Any]) -> None:
    """That no hook called the attention module without its mask, as causal attention.

    Args:
        name: the module's type.
        call: its keyword arguments.
    """
    context: CallContext | None = call.get("nsa_call")
    if call.get("is_causal") and context is not None and "is_causal" not in context.passed:
        raise ValueError(
            f"{name} was given is_causal=True in the place of its attention_mask, as accelerate's "
            "context parallelism (ParallelismConfig(cp_size=...)) does: prepare the model without "
            "it, and share sequences out by nsa_flex.context_parallel(model, mesh) and "
            "nsa_flex.shard_batch"
        )


_ALONE = "pass one document a row, padded (in nsa-flex train: data.documents joined)"
_RECURRENT = (
    "the recurrent layers (linear attention, convolutions) carry their state from one document to "
    f"the next: {_ALONE}"
)
_MASKS = (
    "the decoder makes the masks of its unpatched attention layers without position_ids, so that "
    f"they mix documents: {_ALONE}"
)


def mixing_of_documents(decoder: Decoder, kept_masks: list[str]) -> str | None:
    """Why a row of `decoder` can hold but one document, or None.

    Patched layers keep documents apart. Layers that carry a state, and unpatched layers whose
    masks know no documents, do not; the latter is read from the source of `forward`.

    Args:
        kept_masks: kinds of mask that unpatched attention modules read.
    """
    if is_recurrent(decoder):
        return _RECURRENT
    return _MASKS if kept_masks and not _makes_masks_of_positions(decoder) else None


def refuse_dropped_bounds(model: nn.Module, decoder: Decoder) -> list[RemovableHandle]:
    """Hooks for models around `decoder` that would swallow `cu_seq_lens_q`: they refuse it."""
    around = [
        each
        for each in model.modules()
        if isinstance(each, PreTrainedModel) and each is not decoder and _holds(each, decoder)
    ]
    return [
        each.register_forward_pre_hook(_refuse_bounds, with_kwargs=True)
        for each in around
        if _drops_arguments(each)
    ]


def _refuse_bounds(module: nn.Module, args: tuple[Any, ...], call: dict[str, Any]) -> None:
    if call.get("cu_seq_lens_q") is not None and call.get("position_ids") is None:
        raise ValueError(
            f"{type(module).__name__} does not hand cu_seq_lens_q down to its decoder, which "
            "would take the row for one document: pass position_ids that restart at each document"
        )


def _holds(model: nn.Module, decoder: Decoder) -> bool:
    return any(each is decoder for each in model.modules())


def _makes_masks_of_positions(decoder: Decoder) -> bool:
    """Whether `forward` names position_ids among the arguments of a mask function."""
    return any(_names_positions(node) for node in _forward_nodes(decoder))


def _names_positions(node: ast.AST) -> bool:
    if isinstance(node, ast.Dict):
        names = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        return {"attention_mask", "position_ids"} <= names
    if isinstance(node, ast.Call) and "mask" in ast.unparse(node.func):
        return any(each.arg == "position_ids" for each in node.keywords)
    return False


def _drops_arguments(model: nn.Module) -> bool:
    """Whether `forward` calls modules of the model, none of them with the `**` that it took."""
    children = {f"self.{name}" for name, _ in model.named_children()}
    calls = [
        node
        for node in _forward_nodes(model)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in children and node.keywords
    ]
    return bool(calls) and not any(each.arg is None for call in calls for each in call.keywords)


def _forward_nodes(module: nn.Module) -> Iterator[ast.AST]:
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return
    yield from ast.walk(ast.parse(textwrap.dedent(source)))
