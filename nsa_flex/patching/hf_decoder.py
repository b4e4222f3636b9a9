"""Decoders of transformers 5, patched behind the library's own attention interface.

The attention modules of a patched decoder call `hf_attention.attention_forward` with queries,
keys and values after position embedding and cache update. What that call lacks comes by forward
pre-hooks, in the keyword arguments that decoders hand down to their attention: the module's own
input (`LayerInput`), and what the caller of the decoder said of padding, documents and cache
(`CallContext`, read by `hf_calls.CallHook`). Attention modules that stay unpatched hold a config
that names the implementation the decoder had before, and get its masks.

What differs between versions of transformers is in `hf_versions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from nsa_flex.joined import joined_input, reads_linearly

# The first registers the implementation, the last what saves a patched model.
from nsa_flex.patching import hf_attention, hf_init, hf_saving  # noqa: F401
from nsa_flex.patching.call_context import LayerInput
from nsa_flex.patching.hf_cache import num_layers
from nsa_flex.patching.hf_calls import CallHook, count_tokens
from nsa_flex.patching.hf_config import (
    Config,
    KeptLayers,
    OwnConfigs,
    former_implementation,
    share_config,
    write_record,
)
from nsa_flex.patching.hf_edited import PatchedLayers
from nsa_flex.patching.hf_falcon import OwnForward, give_back_forwards, own_forwards
from nsa_flex.patching.hf_handover import hand_over
from nsa_flex.patching.hf_last_hook import LastHook, register_last, remove_copies
from nsa_flex.patching.hf_layer_types import kind_of_mask
from nsa_flex.patching.hf_layers import (
    Attention,
    Decoder,
    is_attention,
    parameter_names,
)
from nsa_flex.patching.hf_packing import mixing_of_documents, refuse_dropped_bounds
from nsa_flex.patching.hf_refusals import check_mask_kept
from nsa_flex.patching.layer import NSALayer

Groups = dict[Decoder, list[Attention]]

_JOINED = ("k_proj", "v_proj")  # with the gates, in one product
_PROJECTIONS = ("q_proj", *_JOINED)


@dataclass
class Installed:
    """What undoes the patch of a decoder; its attribute `nsa_installed`.

    num_layers: how many layers its config named then.
    """

    config: Config
    hooks: list[RemovableHandle | LastHook | OwnForward]
    configs: OwnConfigs
    num_layers: int


def install(model: nn.Module, groups: Groups, configs: OwnConfigs) -> None:
    """Route attention modules, which have their `nsa`, through NSA.

    The config of each decoder, a copy from now on, gets a record of it: plain JSON, which
    `save_pretrained` writes.

    Args:
        model: what `patch` was called with.
        groups: attention modules by decoder.
        configs: `own_configs(model)`.
    """
    configs.give_to(model)
    for decoder, modules in groups.items():
        _install(model, decoder, modules, configs)


def _install(
    model: nn.Module, decoder: Decoder, modules: list[Attention], configs: OwnConfigs
) -> None:
    config, layer = decoder.config, modules[0].nsa
    former = former_implementation(config)
    kept = kept_modules(decoder, set(modules))
    masks = kept_masks(kept)
    own_config = configs.keep_apart(kept, config, former)
    hook = CallHook(
        arguments=parameter_names(decoder),
        patched=PatchedLayers(decoder, tuple(modules)),
        config=layer.config,
        kept_masks=tuple(masks),
        mixing=mixing_of_documents(decoder, masks),
        kept=None if own_config is None else KeptLayers(own_config, former),
        rotates=any("Rotary" in type(module).__name__ for module in decoder.modules()),
    )
    decoder.nsa_installed = Installed(
        config,
        [
            *(_hook_attention(module) for module in modules),
            register_last(decoder, hook),
            *hand_over(decoder, modules),
            *own_forwards(modules),
            *refuse_dropped_bounds(model, decoder),
            decoder.register_forward_hook(count_tokens, with_kwargs=True),
        ],
        configs,
        num_layers(config),
    )
    configs.in_use.append(config)
    record = {
        "config": layer.config.to_dict(),
        "init": layer.init,
        "backend": layer.backend,
        "layers": [name for name, module in decoder.named_modules() if module in modules],
        "attn_implementation": former,
        "kept_masks": masks,
    }
    write_record(decoder, record)
    hf_init.install(decoder)


def remove(model: nn.Module, groups: Groups) -> None:
    """Undo `install` for the decoders in `groups`."""
    for decoder in groups:
        hf_init.remove(decoder)
        for hook in decoder.nsa_installed.hooks:
            hook.remove()
        for module in decoder.modules():
            remove_copies(module)
        give_back_forwards(groups[decoder])
        share_config(decoder)
        decoder.nsa_installed.configs.release(decoder.nsa_installed.config)
    for decoder in groups:
        decoder.nsa_installed.configs.give_back(model)
        del decoder.nsa_installed


def kept_modules(decoder: Decoder, patched: set[nn.Module]) -> list[Attention]:
    """The attention modules that stay unpatched."""
    return [m for m in decoder.modules() if is_attention(m) and m not in patched]


def kept_masks(kept: list[Attention]) -> list[str]:
    """Kinds of mask, of "full" and "local", that attention modules read."""
    return sorted({kind for kind in map(kind_of_mask, kept) if kind is not None})


def check_decoder(decoder: Decoder, patched: set[nn.Module]) -> None:
    """That NSA can run in `decoder` as a whole.

    Raises:
        ValueError: it lacks layers that its config records, its unpatched attention modules could
            not run beside NSA, or a patched one shares its layer of the cache.
    """
    if hasattr(decoder.config, "nsa_flex"):
        raise ValueError(
            f"the config of {type(decoder).__name__} records NSA layers (config.nsa_flex) that "
            "the model does not have, as from_config leaves it, or a from_pretrained that "
            "dropped them: call nsa_flex.load(path) for the trained ones; for fresh ones del "
            "model.config.nsa_flex first"
        )
    _check_cache_layers(decoder, patched)
    implementation = former_implementation(decoder.config)
    if not kept_modules(decoder, patched) or implementation in ("eager", "sdpa"):
        return
    raise ValueError(
        f"some attention layers stay unpatched, and {implementation!r} cannot run beside NSA: "
        "call model.set_attn_implementation('sdpa') before patch"
    )


def _check_cache_layers(decoder: Decoder, patched: set[nn.Module]) -> None:
    if getattr(decoder.config, "add_cross_attention", False):
        return  # refused by that name, with the shapes of its layers
    seen: dict[int, str] = {}
    modules = {name: m for name, m in decoder.named_modules() if is_attention(m)}
    for name, module in modules.items():
        other = seen.setdefault(module.layer_idx, name)
        if other != name and patched & {module, modules[other]}:
            raise ValueError(
                f"{other} and {name} have the same layer_idx={module.layer_idx}, so that the "
                "model itself chooses a layer of the cache at each use: NSA keeps the compressed "
                "keys of one module in one layer; leave such layers out with filter_fn"
            )


@dataclass(frozen=True)
class InputHook:
    """Forward pre-hook of a patched attention module: what it was called with, handed on.

    Args:
        arguments: names of the module's parameters in order.
        joins: whether the module may be given a `JoinedInput` for its input.
    """

    arguments: tuple[str, ...]
    joins: bool = False

    def __call__(
        self, module: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = kwargs
        if args:
            call = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        check_mask_kept(type(module).__name__, call)
        name = "hidden_states" if "hidden_states" in call else self.arguments[0]
        hidden_states, joined = call[name], None
        if self.joins and _is_without_cache(call) and type(module.nsa) is NSALayer:
            maps = [getattr(module, each) for each in _JOINED]
            joined = joined_input(hidden_states, maps, module.nsa.gates)
        got = LayerInput(hidden_states, call.get("attention_mask"), joined)
        if joined is not None and args:
            args = (joined, *args[1:])
        elif joined is not None:
            kwargs = {**kwargs, name: joined}
        return args, {**kwargs, "nsa_input": got}


def _is_without_cache(call: dict[str, Any]) -> bool:
    context = call.get("nsa_call")
    return context is not None and context.cache is None and context.paged is None


def _hook_attention(module: Attention) -> LastHook:
    arguments = parameter_names(module)
    separate = all(hasattr(module, name) for name in _PROJECTIONS)
    joins = separate and reads_linearly(module, arguments[0], _PROJECTIONS)
    return register_last(module, InputHook(arguments, joins))
