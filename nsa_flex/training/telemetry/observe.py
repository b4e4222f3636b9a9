"""What each NSA layer does with a batch: an extra forward, without gradients, outside the graphs.

The compiled code of the training step stays as it is: nothing is added to it, so that telemetry
breaks no graph and costs nothing between measurements.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import nsa_flex.module
import nsa_flex.patching.layer
from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import BranchName, Choice, choose_backends
from nsa_flex.documents import align_packed
from nsa_flex.inputs import Inputs
from nsa_flex.module import NSAAttention
from nsa_flex.patching import NSALayer

# What compilation and activation checkpointing put into the names of modules.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")

Probe = Mapping[str, Any] | Tensor | Callable[[], Any]


@dataclass(frozen=True)
class Observation:
    """One call of a layer's attention core.

    name: of the module in the model.
    config: of the layer.
    gates: (B, Hq, S, C), of the config's branches.
    blocks: int32 (B, Hkv, S, n), the chosen ones, ascending, -1 where there are fewer; None
        without a selected branch.
    document_start: int (B, S), first token of each query's document, or None.
    real: bool (B, S), false at places that alignment filled; None where all are real.
    choices: the backends that the same call with gradients takes.
    """

    name: str
    config: NSAConfig
    gates: Tensor
    blocks: Tensor | None
    document_start: Tensor | None
    real: Tensor | None
    choices: Mapping[BranchName, Choice]


def nsa_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The NSA layers of a model by name: what `patch` added, and `NSAAttention` modules.

    Names are those that the model has before it is wrapped and compiled.
    """
    return {
        _plain(name): module
        for name, module in unwrapped(model).named_modules()
        if isinstance(module, (NSALayer, NSAAttention))
    }


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile, or `model` itself."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def probe_call(model: nn.Module, probe: Probe) -> Callable[[], Any]:
    """What runs the model on `probe`: a batch of keyword arguments, a tensor, or a function.

    Raises:
        ValueError: the batch has padding, which the statistics would count.
    """
    if callable(probe) and not isinstance(probe, Tensor):
        return probe
    # Not through DDP, whose forward broadcasts buffers: a collective of all ranks.
    model = unwrapped(model)
    batch: dict[str, Any] = {"input_ids": probe} if isinstance(probe, Tensor) else dict(probe)
    mask = batch.pop("attention_mask", None)
    if isinstance(mask, Tensor) and not bool((mask != 0).all()):
        raise ValueError(
            "the probe's attention_mask has padding, which the statistics would count: pass rows "
            "without padding"
        )
    if getattr(getattr(model, "config", None), "use_cache", None) is not None:
        batch["use_cache"] = False
    if isinstance(probe, Tensor) and "use_cache" not in batch:
        return lambda: model(probe)
    if "labels" not in batch:
        batch = without_logits(model) | batch
    return lambda: model(**batch)


def without_logits(model: nn.Module) -> dict[str, Any]:
    """Arguments with which a language model computes logits of the last token alone, or none."""
    knows = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": 1} if knows else {}


def observe(model: nn.Module, call: Callable[[], Any]) -> list[Observation]:
    """Call `call` once, eagerly and without gradients; one entry for each NSA call of `model`.

    The model is in eval mode meanwhile. Its parameters, buffers that training changes and torch's
    random states are as they were afterwards.
    """
    found: list[Observation] = []
    training = {module: module.training for module in model.modules()}
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        model.eval()
        with (
            torch.random.fork_rng(devices),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            _watched(model, found),
        ):
            call()
    finally:
        for module, mode in training.items():
            module.training = mode
    return found


@contextlib.contextmanager
def _watched(model: nn.Module, found: list[Observation]) -> Iterator[None]:
    """Within, note every call of `nsa_attention`, and by which layer."""
    current: dict[str, Any] = {}
    homes: tuple[Any, ...] = (nsa_flex.module, nsa_flex.patching.layer)
    attention = nsa_flex.patching.layer.nsa_attention

    def noting(*tensors: Tensor, return_aux: bool = False, **options: Any) -> Any:
        out, aux = attention(*tensors, return_aux=True, **options)
        found.append(_observation(current, tensors, aux.blocks, options))
        return (out, aux) if return_aux else out

    def entering(name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            current.update(name=name, real=_real_places(module, args, kwargs))

        return hook

    handles = [
        module.register_forward_pre_hook(entering(name), with_kwargs=True)
        for name, module in nsa_layers(model).items()
    ]
    for home in homes:
        home.nsa_attention = noting
    try:
        yield
    finally:
        for home in homes:
            home.nsa_attention = attention
        for handle in handles:
            handle.remove()


def _observation(
    current: dict[str, Any],
    tensors: tuple[Any, ...],
    blocks: Tensor | None,
    options: dict[str, Any],
) -> Observation:
    query, key, value, *_, gates = tensors
    own = [options.get(name) for name in ("sliding_key", "sliding_value")]
    sliding_key, sliding_value = (
        x if y is None else y for x, y in zip((key, value), own, strict=True)
    )
    # Dispatch looks at no compressed tensor, of which some may be None.
    inputs = Inputs(query, key, value, key, value, sliding_key, sliding_value, gates)
    config, start = options["config"], options.get("document_start")
    facts = inputs.facts(config, options.get("query_offset"), start)
    choices = choose_backends(replace(facts, needs_grad=True), options.get("backend", "auto"))
    return Observation(current["name"], config, gates, blocks, start, current["real"], choices)


def _real_places(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Bool (1, S'): where packed documents, once aligned, have a token; None without documents."""
    layout = None
    if isinstance(module, NSALayer):
        rows = kwargs.get("rows")
        layout = None if rows is None else rows.queries
    elif kwargs.get("cu_seqlens") is not None:
        x = args[0] if args else kwargs["x"]
        layout = align_packed(kwargs["cu_seqlens"], x.shape[1], module.config)
    if layout is None:
        return None
    real = torch.zeros_like(layout.source, dtype=torch.bool)
    real.view(-1)[layout.target.flatten()] = True
    return real
