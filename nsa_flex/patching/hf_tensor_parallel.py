"""Tensor parallelism of transformers models: NSA's entry in their plans, and who split what.

A model of transformers has a plan (`tp_plan`): names of modules, layers as `*`, and a style for
each. `patch` adds its layers under the style "nsa_flex", where the plan splits queries, keys and
values by heads, so that whatever applies the plan splits them too. A checkpoint is sharded while
it is loaded, before it has NSA layers: `mesh_of` finds the mesh that `patch` then splits them on.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.distributed import tensor_parallel

from nsa_flex.patching.hf_families import family_of
from nsa_flex.patching.hf_layers import IMPLEMENTATION, Attention, Decoder
from nsa_flex.patching.layer import layer_of
from nsa_flex.patching.split_heads import check_heads_divide, split_heads
from nsa_flex.sharded import is_sharded

_BY_HEADS = "colwise"  # the style of projections whose outputs stay where they are


class _Style(tensor_parallel.TensorParallelLayer):
    """What transformers applies to an NSA layer."""

    def install_forward(self, module: Any, mesh: Any) -> Any:
        """Leave the layer this rank's heads."""
        check_heads_divide("an NSA layer", module.shape, mesh.size(), "tensor parallelism")
        split_heads(module, mesh)
        return module


tensor_parallel.ALL_PARALLEL_STYLES.register(IMPLEMENTATION, _Style())


def install(model: nn.Module) -> None:
    """Name the NSA layers in the plans of the transformers models in `model`."""
    for holder in _with_plans(model):
        plan = holder._tp_plan
        names = {
            _wildcard(name)
            for name, module in holder.named_modules()
            if layer_of(module) is not None and _splits_heads(plan, _wildcard(name), module)
        }
        # A plan of its own: others may hold this one.
        holder._tp_plan = {**plan, **{f"{name}.nsa": IMPLEMENTATION for name in sorted(names)}}


def remove(model: nn.Module) -> None:
    """Undo `install`."""
    for holder in _with_plans(model):
        plan = holder._tp_plan.items()
        holder._tp_plan = {name: style for name, style in plan if style != IMPLEMENTATION}


def apply_plan(model: Any, mesh: Any) -> None:
    """Shard a transformers model by its plan, NSA layers included where that splits heads.

    Raises:
        ValueError: it has no plan.
    """
    if not isinstance(model, PreTrainedModel) or not model._tp_plan:
        raise ValueError(
            f"{type(model).__name__} has no tp_plan: shard its projections by torch's "
            "parallelize_module first, then call nsa_flex.tensor_parallel(model, mesh)"
        )
    tensor_parallel.apply_tensor_parallelism(model, mesh, *_expanded(model))
    model._tp_size = mesh.size()
    model.tie_weights()


def _expanded(model: Any) -> tuple[dict[str, str], ...]:
    """The plan with the numbers of layers; versions that cannot make one read the model's."""
    if not hasattr(model, "_expand_parallel_plan"):
        return ()
    plan = model._expand_parallel_plan(model._tp_plan)
    # A tied parameter is found by one of its names.
    known = dict(model.named_modules()).keys() | dict(model.named_parameters()).keys()
    return ({name: style for name, style in plan.items() if name in known},)


def mesh_of(name: str, module: Attention, decoder: Decoder) -> Any:
    """The mesh over which the heads of an attention module are split; None if they are whole.

    Raises:
        ValueError: some of its parameters are DTensors in another way.
    """
    parameters = {key: x for key, x in module.named_parameters() if not key.startswith("nsa.")}
    sharded = {key: x for key, x in parameters.items() if is_sharded(x)}
    plan = vars(decoder).get("_tp_plan") or {}
    styles = _styles(plan, _wildcard(_name_in(decoder, module)), module)
    if not sharded or not styles <= {_BY_HEADS, None}:
        return None
    weights = [f"{each}.weight" for each in family_of(module).widths]
    ways: Any = {(x.device_mesh, x.placements) for key, x in sharded.items() if key in weights}
    if len(ways) == 1 and sharded.keys() >= set(weights):
        ((mesh, placements),) = ways
        if len(placements) == 1 and placements[0].is_shard(0):
            return mesh
    odd: tuple[str, Any] = next(iter(sharded.items()))
    raise ValueError(
        f"{name}.{odd[0]} is a DTensor, {odd[1].placements}, and NSA's heads go with "
        f"{', '.join(weights)} that all are Shard(0) on one dimension of a mesh: call "
        "nsa_flex.patch first, then nsa_flex.tensor_parallel(model, mesh) or fully_shard"
    )


def _splits_heads(plan: dict[str, str], name: str, module: Attention) -> bool:
    return _styles(plan, name, module) == {_BY_HEADS}


def _styles(plan: dict[str, str], name: str, module: Attention) -> set[str | None]:
    """Of the projections of the attention module called `name`; None for those left out."""
    return {plan.get(f"{name}.{each}") for each in family_of(module).widths}


def _wildcard(name: str) -> str:
    """As plans name a module: numbers of layers are `*`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _name_in(decoder: Decoder, module: Attention) -> str:
    return next(name for name, each in decoder.named_modules() if each is module)


def _with_plans(model: nn.Module) -> list[Any]:
    return [
        each
        for each in model.modules()
        if isinstance(each, PreTrainedModel) and vars(each).get("_tp_plan")
    ]
