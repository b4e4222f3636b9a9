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

import functools
from dataclasses import dataclass

from torch import nn
from torch.utils.hooks import RemovableHandle

from nsa_flex.compression import Compression
from nsa_flex.gates import Gates
from nsa_flex.patching import hf_generation, hf_saving, hf_tensor_parallel
from nsa_flex.patching.hf_attention import OwnForward, give_back_forwards, own_forwards
from nsa_flex.patching.hf_cache import num_layers
from nsa_flex.patching.hf_calls import CallHook, count_tokens
from nsa_flex.patching.hf_config import (
    Config,
    KeptLayers,
    OwnConfigs,
    former_implementation,
    own_configs,
    share_config,
    write_record,
)
from nsa_flex.patching.hf_edited import PatchedLayers
from nsa_flex.patching.hf_families import kind_of_mask
from nsa_flex.patching.hf_hooks import (
    LastHook,
    hand_over,
    hook_attention,
    register_last,
    remove_copies,
)
from nsa_flex.patching.hf_layers import (
    IMPLEMENTATIONS,
    Attention,
    Decoder,
    is_attention,
    parameter_names,
)
from nsa_flex.patching.hf_refusals import (
    mixing_of_documents,
    refuse_dropped_bounds,
)
from nsa_flex.patching.layer import NSALayer
from nsa_flex.patching.minicpm_config import is_own
from nsa_flex.patching.split_heads import split_heads as split_heads

Groups = dict[Decoder, list[Attention]]


@dataclass
class Installed:
    """What undoes the patch of a decoder; its attribute `nsa_installed`.

    num_layers: how many layers its config named then.
    """

    config: Config
    hooks: list[RemovableHandle | LastHook | OwnForward]
    configs: OwnConfigs
    num_layers: int


def prepare(model: nn.Module, groups: Groups) -> OwnConfigs:
    """Check that NSA can run in these decoders, and copy the configs; nothing is changed yet."""
    for decoder, modules in groups.items():
        _check_decoder(decoder, set(modules))
    return own_configs(model)


def install(model: nn.Module, groups: Groups, configs: OwnConfigs) -> None:
    """Route attention modules, which have their `nsa`, through NSA.

    The config of each decoder, a copy from now on, gets a record of it: plain JSON, which
    `save_pretrained` writes.

    Args:
        model: what `patch` was called with.
        groups: attention modules by decoder.
        configs: of `prepare`.
    """
    configs.give_to(model)
    for decoder, modules in groups.items():
        _install(model, decoder, modules, configs)
    hf_saving.install(model, set(groups))
    hf_generation.install(model, set(groups))
    hf_tensor_parallel.install(model)


def _install(
    model: nn.Module, decoder: Decoder, modules: list[Attention], configs: OwnConfigs
) -> None:
    config, layer = decoder.config, modules[0].nsa
    former = former_implementation(config)
    kept = _kept_modules(decoder, set(modules))
    masks = _kept_masks(kept)
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
            *(hook_attention(module) for module in modules),
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
    _install_init_weights(decoder)


def remove(model: nn.Module, groups: Groups) -> None:
    """Undo `install` for the decoders in `groups`."""
    hf_tensor_parallel.remove(model)
    hf_generation.remove(model, set(groups))
    hf_saving.remove(model, set(groups))
    for decoder in groups:
        del decoder._init_weights
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


def _kept_modules(decoder: Decoder, patched: set[nn.Module]) -> list[Attention]:
    """The attention modules that stay unpatched."""
    return [m for m in decoder.modules() if is_attention(m) and m not in patched]


def _kept_masks(kept: list[Attention]) -> list[str]:
    """Kinds of mask, of "full" and "local", that attention modules read."""
    return sorted({kind for kind in map(kind_of_mask, kept) if kind is not None})


def _check_decoder(decoder: Decoder, patched: set[nn.Module]) -> None:
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
    if not _kept_modules(decoder, patched):
        return
    if is_own(decoder.config) and decoder.config._attn_implementation in IMPLEMENTATIONS:
        raise ValueError(
            "some attention layers stay unpatched, and InfLLM-V2 cannot run beside NSA: patch all "
            "layers, or call model.set_attn_implementation('sdpa') before patch, with which the "
            "others are dense"
        )
    implementation = former_implementation(decoder.config)
    if implementation in ("eager", "sdpa"):
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


def _install_init_weights(decoder: Decoder) -> None:
    """Let `init_weights` of `decoder`, or of a model that holds it, start φ and gates right.

    transformers asks the model's `_init_weights` about each module, children before parents, and
    that does not know φ and gates.
    """
    decoder._init_weights = functools.partial(_init_weights, decoder)
    for layer in decoder.modules():
        if isinstance(layer, NSALayer):
            _mark_initialized(layer)


def _init_weights(decoder: Decoder, module: nn.Module) -> None:
    if isinstance(module, (Compression, Gates)):
        module.reset_parameters()
    else:
        type(decoder)._init_weights(decoder, module)


def _mark_initialized(layer: NSALayer) -> None:
    """As transformers marks modules, so that a second `init_weights` leaves them alone."""
    if not any(x.is_meta for x in layer.state_dict().values()):
        for module in layer.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]
