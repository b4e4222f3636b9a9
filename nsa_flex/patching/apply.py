"""`patch` and `unpatch`: NSA into the attention layers of a model, in place, and out again."""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeVar, get_args

from torch import nn

from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import BRANCHES, Backend, BackendName
from nsa_flex.gates import GateInit
from nsa_flex.patching import adapters
from nsa_flex.patching.layer import NSALayer
from nsa_flex.patching.sites import Filter, Site, choose_sites, patched_sites
from nsa_flex.patching.tensor_parallel import mesh_of_site
from nsa_flex.patching.wrapped import check_unwrapped

ModelT = TypeVar("ModelT", bound=nn.Module)


def patch(
    model: ModelT,
    config: NSAConfig | None = None,
    *,
    init: GateInit = "paper",
    filter_fn: Filter | None = None,
    backend: Backend = "auto",
) -> ModelT:
    """Give the causal self-attention layers of `model` Native Sparse Attention, in place.

    Each of them gets a submodule `nsa` (`NSALayer`: φ of keys and values, gates) on the device
    and in the dtype of its projections. No existing parameter is touched.

    Args:
        model: a transformers decoder, or any module whose attention type has an adapter
            (`register_adapter`). Patch it before torch.compile, DDP, fully_shard and PEFT. A
            model whose heads a tensor-parallel plan split gets NSA layers that are split alike.
        config: NSA's sizes; `NSAConfig()` if None.
        init: "paper" starts with neutral gates; "dense" with gates (0, 1, 0), so that a
            pretrained model computes what it did while S <= num_selected_blocks *
            select_block_size, and its gates can learn; "unbiased" as "paper", with the gates of
            public checkpoints (see `Gates`).
        filter_fn: (module, name) -> whether to patch this attention module. If None, all of them
            but those with a sliding window (or another limit on their context), which keep
            their own attention.
        backend: as of `nsa_attention`.

    Returns:
        `model`. Patching again with the same arguments changes nothing.

    Raises:
        ValueError: the model was patched with other arguments, is compiled, wrapped or sharded
            otherwise already, has no attention module that can be patched, or has one with a
            feature that NSA does not compute; the message names it. The model is then as it was.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes))
    >>> model = patch(model, NSAConfig(window_size=256), init="dense")
    >>> [name for name, _ in model.named_modules() if name.endswith("nsa")]
    ['model.layers.0.self_attn.nsa', 'model.layers.1.self_attn.nsa']
    """
    config = NSAConfig() if config is None else config
    _check_arguments(model, config, init)
    _check_backend(backend)
    check_unwrapped(model)
    sites = choose_sites(model, filter_fn)
    arguments: dict[str, Any] = {"config": config, "init": init, "backend": _plain(backend)}
    if _is_patched_so(model, sites, arguments):
        return model
    meshes = [mesh_of_site(site) for site in sites]
    groups = _by_decoder(sites)
    configs = _transformers_decoder().prepare(model, groups) if groups else None
    layers = [
        NSALayer(site.shape(), **arguments, **site.tensor_options()).train(site.module.training)
        for site in sites
    ]
    for layer, mesh in zip(layers, meshes, strict=True):
        if mesh is not None:
            _transformers_decoder().split_heads(layer, mesh)
    # Everything that can fail has passed: the model changes from here on.
    for site, layer in zip(sites, layers, strict=True):
        site.module.add_module("nsa", layer)
        if site.adapter is not None:
            adapters.install(site.module)
    if groups:
        _transformers_decoder().install(model, groups, configs)
    return model


def unpatch(model: ModelT) -> ModelT:
    """Undo `patch`, in place: modules, state dict, hooks and configs are as they were before.

    Pretrained parameters that were trained meanwhile keep their values. A model that is not
    patched is returned as it is.
    """
    sites = list(patched_sites(model))
    for site in sites:
        if site.decoder is None:
            adapters.remove(site.module)
    groups = _by_decoder(sites)
    for module in model.modules():
        if "nsa_installed" in vars(module):  # all its layers may have been exchanged since
            groups.setdefault(module, [])
    if groups:
        _transformers_decoder().remove(model, groups)
    for site in sites:
        del site.module.nsa
    return model


def _check_arguments(model: nn.Module, config: NSAConfig, init: GateInit) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be an nn.Module")
    if not isinstance(config, NSAConfig):
        raise TypeError(f"config is a {type(config).__name__}; it must be an NSAConfig")
    if init not in get_args(GateInit):
        names = ", ".join(get_args(GateInit))
        raise ValueError(f"init is {init!r}; it must be one of {names}")
    for module in model.modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise ValueError("the model is compiled already: patch it before torch.compile")


def _check_backend(backend: Backend) -> None:
    """Names only: what a backend can compute depends on the device that the model runs on."""
    by_branch = {"backend": backend} if isinstance(backend, str) else dict(backend)
    unknown = sorted(set(by_branch) - {"backend", *BRANCHES})
    if unknown:
        raise ValueError(f"backend names branches {unknown}; known are {', '.join(BRANCHES)}")
    for name in by_branch.values():
        if name not in get_args(BackendName):
            known = ", ".join(get_args(BackendName))
            raise ValueError(f"backend is {name!r}; it must be one of {known}")


def _is_patched_so(model: nn.Module, sites: list[Site], arguments: dict[str, Any]) -> bool:
    """Whether the model is patched with these arguments; ValueError if with others."""
    layers = {site.name: site.module.nsa for site in patched_sites(model)}
    found = {
        name: {"config": layer.config, "init": layer.init, "backend": layer.backend}
        for name, layer in layers.items()
    }
    if found and found != {site.name: arguments for site in sites}:
        raise ValueError(
            "the model is patched already, with other arguments (config, init, backend or "
            "layers): call nsa_flex.unpatch(model) first"
        )
    return bool(found)


def _by_decoder(sites: list[Site]) -> dict[nn.Module, list[nn.Module]]:
    groups: dict[nn.Module, list[nn.Module]] = {}
    for site in sites:
        if site.decoder is not None:
            groups.setdefault(site.decoder, []).append(site.module)
    return groups


def _plain(backend: Backend) -> Backend:
    """A backend that equal ones compare equal to, and that JSON takes."""
    return backend if isinstance(backend, str) else dict(backend)


def _transformers_decoder() -> ModuleType:
    """What patches transformers' decoders; imported only where there is one."""
    from nsa_flex.patching import hf_decoder

    return hf_decoder
