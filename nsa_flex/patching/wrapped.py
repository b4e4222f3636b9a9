"""Models that something has wrapped already: patch comes first."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn


def check_unwrapped(model: nn.Module, call: str = "patch") -> None:
    """That nothing holds on to the parameters of `model` which patch would add to.

    A wrapper collects parameters when it is made. Those that patch adds later would never be
    synchronised between ranks, sharded, or saved with an adapter, without a word.

    Args:
        call: the function of this package that is to come first.

    Raises:
        ValueError: `model`, a module of it, or a module that holds it, is wrapped for data
            parallel training; parameters are offloaded; or PEFT adapters are in it.
    """
    modules = list(model.modules())
    _check_data_parallel(modules, call)
    _check_peft(modules, call)
    _check_offloaded(modules, call)


def _check_data_parallel(modules: list[nn.Module], call: str) -> None:
    wrappers = _data_parallel_wrappers()
    types = tuple(wrappers)
    wrapper = next((each for each in modules if isinstance(each, types)), None)
    if wrapper is None:
        wrapper = _holder(set(modules), types)
    if wrapper is not None:
        how = next(how for kind, how in wrappers.items() if isinstance(wrapper, kind))
        raise ValueError(
            f"the model is {how} already, which would never synchronise the parameters that "
            f"{call} adds: call nsa_flex.{call} first, then wrap it"
        )


def _data_parallel_wrappers() -> dict[type, str]:
    """Types of data parallel training that are imported, and what they do to a model."""
    wrappers: dict[type, str] = {
        nn.parallel.DistributedDataParallel: "wrapped by DistributedDataParallel"
    }
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        wrappers[fsdp.FSDPModule] = "sharded by fully_shard"
        wrappers[fsdp.FullyShardedDataParallel] = "wrapped by FullyShardedDataParallel"
    return wrappers


def _holder(modules: set[nn.Module], wrappers: tuple[type, ...]) -> nn.Module | None:
    """The wrapper that holds one of `modules`: nothing in these points to it.

    Looked for among all objects, and only in a process of a distributed job.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if _find(wrappers, modules) is None:
        return None
    gc.collect()  # one that was dropped, and is garbage, is none
    return _find(wrappers, modules)


def _find(wrappers: tuple[type, ...], modules: set[nn.Module]) -> nn.Module | None:
    live: Iterable[Any] = (each for each in gc.get_objects() if issubclass(type(each), wrappers))
    return next((each for each in live if not modules.isdisjoint(each.modules())), None)


def _check_peft(modules: list[nn.Module], call: str) -> None:
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    types = (peft.PeftModel, peft.PeftMixedModel, BaseTunerLayer)
    if any(isinstance(each, types) for each in modules):
        raise ValueError(
            f"the model has PEFT adapters already, which would be saved without what {call} adds: "
            f"call nsa_flex.{call} on the base model first, then get_peft_model with "
            'modules_to_save=["nsa"] in its config'
        )


def _check_offloaded(modules: list[nn.Module], call: str) -> None:
    """accelerate's hooks bring offloaded parameters at each call, and know no new ones."""
    for module in modules:
        if is_offloaded(module):
            raise ValueError(
                f"parameters of the model are offloaded by accelerate, so that {call} cannot tell "
                f"on which device those that it adds belong: call nsa_flex.{call} first, then "
                "accelerate.dispatch_model or cpu_offload"
            )


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate brings parameters of this module, from elsewhere, at each call."""
    return hasattr(module, "_hf_hook") and any(x.is_meta for x in module.parameters(recurse=False))
