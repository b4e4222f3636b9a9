"""`load`, and transformers' Auto classes: a patched model from what `save_pretrained` wrote."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import Backend
from nsa_flex.patching.apply import patch
from nsa_flex.patching.formats import own_name, upstream_tensors
from nsa_flex.patching.layer import layer_of
from nsa_flex.patching.sites import Site, find_sites, patched_sites
from nsa_flex.patching.wrapped import is_offloaded
from nsa_flex.sharded import sharded_like

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_MAY_LACK = {"_raise_exceptions_for_missing_entries": False}  # None then
# Arguments of from_pretrained that say where files are.
_HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
# Arguments of from_pretrained that are not for the config, though it has some by these names.
_KEPT_ARGUMENTS = ("dtype", "quantization_config", "torch_dtype")


def load(
    path: str | Path,
    *,
    backend: Backend | None = None,
    model_class: Any = None,
    **kwargs: Any,
) -> Any:
    """Read a patched model that `model.save_pretrained(path)` wrote, on disk or on the hub.

    Or one that others trained, as they published it: NSA-1B, SSA-1B and MoBA-1B (model type
    llama-nsa), MiniCPM4-8B and MiniCPM4.1-8B (minicpm), of which every tensor must be taken. No
    code that comes with a checkpoint is run.

    The model is built and loaded by transformers, patched as the record in its config says, and
    given the saved `...nsa.*` tensors, in the dtype they were saved in unless `dtype` is among
    the arguments. Only safetensors files are read. `from_pretrained` of the Auto classes does the
    same with such a checkpoint once nsa_flex is imported, and with an adapter of PEFT whose base
    it is.

    Args:
        path: directory or hub name.
        backend: as of `nsa_attention`; the saved one if None.
        model_class: whose `from_pretrained` to call; if None that of the class which was saved.
        kwargs: passed to `from_pretrained`. `variant` says of NSA's tensors, too, which are meant.
            `selection` and `inference_mode` say otherwise of such a checkpoint than its config.
            `attn_implementation` is for attention that is not patched, or no more; a warning says
            so where there is none.

    Returns:
        the model, in eval mode; with `output_loading_info=True` a pair with transformers' report.

    Raises:
        ValueError: the checkpoint is not of a patched model, is of a class that transformers does
            not have, lacks tensors of the model or has them in other sizes, or has some of NSA
            that no layer takes; `device_map` offloads, or `distributed_config` asks for a
            pipeline. (A head that it lacks, of a classifier for example, is a new one, with a
            warning.)

    >>> model = load("my-checkpoint", dtype=torch.bfloat16)  # doctest: +SKIP
    """
    from nsa_flex.patching import hf_saving

    hub = {k: v for k, v in kwargs.items() if k in _HUB_ARGUMENTS}
    wants_report, adapter = kwargs.pop("output_loading_info", False), _pop_adapter(kwargs)
    _check_no_pipeline(kwargs.get("distributed_config"))
    config, kwargs = _read_config(path, hub, kwargs)
    if _is_minicpm(config) and getattr(config, "nsa_flex", None) is None:
        return _load_minicpm(path, config, model_class, backend, wants_report, kwargs)
    record = _pop_record(config, path)
    attention = config._attn_implementation or kwargs.get("attn_implementation")
    model, report = _load_unpatched(path, model_class, {**kwargs, "config": config}, record)
    _check_not_offloaded(model)
    patch_as_recorded(model, record, backend)
    _say_what_attends(model, attention)
    added = _read_added(path, hub, kwargs.get("variant"), record)
    cast = "dtype" in kwargs or "torch_dtype" in kwargs
    _assign(model, added, record, cast=cast)
    hf_saving.name_checkpoint(model, path)
    if adapter is not None:
        model.load_adapter(**adapter)
    return (model, report) if wants_report else model


def _check_no_pipeline(config: Any) -> None:
    """That transformers will not leave out layers, whose NSA tensors nothing would take."""
    stages = config.get("pp_size") if isinstance(config, dict) else getattr(config, "pp_size", 1)
    if stages is not None and stages > 1:
        raise ValueError(
            f"pp_size={stages} in distributed_config: transformers' pipeline parallelism of a "
            "patched checkpoint is not supported; load it without, and give each rank its layers "
            "by torch.distributed.pipelining"
        )


def _is_minicpm(config: Any) -> bool:
    return getattr(config, "model_type", None) in ("minicpm", "minicpm4")


def _load_minicpm(
    path: str | Path,
    config: Any,
    model_class: Any,
    backend: Any,
    wants_report: bool,
    kwargs: dict[str, Any],
) -> Any:
    """A MiniCPM4, which nothing is patched in: its class has the attention it was trained with."""
    from transformers import AutoModelForCausalLM

    if backend not in (None, "auto"):
        raise ValueError(
            f"backend={backend!r} is for patched models; of a {config.model_type} leave it out"
        )
    options = {**kwargs, "use_safetensors": True, "output_loading_info": wants_report}
    loader = AutoModelForCausalLM if model_class is None else model_class
    return loader.from_pretrained(path, config=config, **options)


def patch_as_recorded(model: Any, record: dict[str, Any], backend: Backend | None = None) -> None:
    """Patch the layers that `record` names, the entry nsa_flex of a patched model's config."""
    own = model.config.get_text_config()
    if record.get("kept_masks") and own._attn_implementation == "nsa_flex":
        model.set_attn_implementation(record["attn_implementation"])  # a MiniCPM4's other layers
    chosen = {site.module for site in _recorded_sites(model, record["layers"])}
    patch(
        model,
        NSAConfig.from_dict(record["config"]),
        init=record["init"],
        backend=record["backend"] if backend is None else backend,
        filter_fn=lambda module, _: module in chosen,
    )
    if "format" in record:
        own = model.config.get_text_config().nsa_flex
        own.update({name: record[name] for name in ("format", "kept")})


def _recorded_sites(model: Any, names: list[str]) -> list[Site]:
    """The layers of these names in their decoder, which other parts of `model` may have too."""
    sites = [site for site in find_sites(model) if _named(site.name, names) is not None]
    text = model.config.get_text_config()
    return [site for site in sites if getattr(site.decoder, "config", None) is text] or sites


def _named(place: str, names: list[str]) -> str | None:
    """The one of `names` that `place` ends with; prefixes differ from model to model."""
    return next((name for name in names if f".{place}".endswith(f".{name}")), None)


def _check_not_offloaded(model: Any) -> None:
    if any(is_offloaded(module) for module in model.modules()):
        raise ValueError(
            "device_map offloads a part of the model, and NSA's layers are added to it while it "
            "is loaded: leave device_map out, or give one that offloads nothing, and call "
            "accelerate.dispatch_model(model, device_map, offload_dir=...) or "
            "accelerate.cpu_offload(model) on the loaded model"
        )


def _say_what_attends(model: Any, asked: Any) -> None:
    """A warning where an attention implementation was asked for that attends nowhere."""
    config = model.config
    others = config.get_text_config() is not config or any(
        site.decoder is not None and layer_of(site.module) is None for site in find_sites(model)
    )
    if isinstance(asked, str) and asked != "nsa_flex" and not others:
        warnings.warn(
            f"attn_implementation={asked!r}: all attention layers of the checkpoint are patched, "
            "and run NSA. It takes effect once nsa_flex.unpatch is called, or "
            f"model.set_attn_implementation({asked!r}), which turns NSA off",
            stacklevel=3,
        )


def _pop_adapter(kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments of `load_adapter`, if the Auto class was called with an adapter of PEFT.

    It hands the adapter's path down beside the path of its base, for the model to load last.
    """
    options = dict(kwargs.get("adapter_kwargs") or {})
    path = options.pop("_adapter_model_path", None)
    if path is None:
        return None
    del kwargs["adapter_kwargs"]
    name = kwargs.pop("adapter_name", "default")
    return {"peft_model_id": path, "adapter_name": name, "adapter_kwargs": options}


def _read_config(
    path: str | Path, hub: dict[str, Any], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The model's config with what `kwargs` says of it, and the rest of `kwargs`."""
    from transformers import AutoConfig

    from nsa_flex.patching.hf_saved_config import NSACheckpointConfig

    config = kwargs.pop("config", None)
    if config is None:
        kept = {k: v for k, v in kwargs.items() if k in _KEPT_ARGUMENTS or k in hub}
        options = {**hub, **{k: v for k, v in kwargs.items() if k not in kept}}
        config, kwargs = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **options)
        kwargs = {**kwargs, **kept}
    base = config.base if isinstance(config, NSACheckpointConfig) else config
    return copy.deepcopy(base), kwargs


def _pop_record(config: Any, path: str | Path) -> dict[str, Any]:
    """Take the record of the patch out of a config: the model is built without it."""
    record = vars(config.get_text_config()).pop("nsa_flex", None)
    if record is None:
        raise ValueError(
            f"{path} is not a checkpoint of a patched model (its config has no nsa_flex): load it "
            "with transformers and call nsa_flex.patch"
        )
    return record


def _load_unpatched(
    path: str | Path, model_class: Any, kwargs: dict[str, Any], record: dict[str, Any]
) -> Any:
    """The model without its NSA layers, which transformers does not know, and its report."""
    from transformers.utils import logging

    loader = _saved_class(kwargs["config"]) if model_class is None else model_class
    ignores_sizes = kwargs.get("ignore_mismatched_sizes", False)
    always = {"use_safetensors": True, "output_loading_info": True}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list every tensor of NSA; the rest is checked below
    try:
        model, report = loader.from_pretrained(
            path, **{**kwargs, **always, "ignore_mismatched_sizes": True}
        )
    finally:
        logging.set_verbosity(verbosity)
    others = sorted(
        f"{key} is {tuple(saved)} and {tuple(own)} in the model"
        for key, saved, own in report["mismatched_keys"]
    )
    if others and not ignores_sizes:
        raise ValueError(
            f"tensors of the checkpoint have other sizes: {', '.join(others)}; with "
            "ignore_mismatched_sizes=True such tensors are newly initialized"
        )
    if others:
        text = f"of other sizes in the checkpoint, newly initialized: {', '.join(others)}"
        warnings.warn(text, stacklevel=3)
    missing = sorted(report["missing_keys"])
    inside = [key for key in missing if not _is_of_a_head(model, key)]
    if inside:
        raise ValueError(f"the checkpoint lacks {', '.join(inside)}")
    if missing:
        names = ", ".join(missing)
        warnings.warn(f"not in the checkpoint, newly initialized: {names}", stacklevel=3)
    unexpected = sorted(key for key in report["unexpected_keys"] if own_name(record, key) is None)
    whole = type(model).__name__ in (kwargs["config"].architectures or [])
    untaken = [key for key in unexpected if whole or not _is_outside(model, key)]
    if untaken and "format" in record:
        raise ValueError(
            f"the checkpoint has tensors that the model does not take: {', '.join(untaken)}; "
            f"it is of another kind than {record['format']}"
        )
    if unexpected:
        warnings.warn(f"not in the model, left out: {', '.join(unexpected)}", stacklevel=3)
    return model, {**report, "unexpected_keys": set(unexpected)}


def _saved_class(config: Any) -> Any:
    """The class of the model that was saved; an Auto class for one that comes with its code."""
    import transformers

    names = config.architectures or []
    if _is_minicpm(config):
        from nsa_flex.patching import minicpm

        return getattr(minicpm, names[0] if names else "", transformers.AutoModelForCausalLM)
    if not names or hasattr(config, "auto_map"):
        return transformers.AutoModelForCausalLM
    found = getattr(transformers, names[0], None)
    if found is None:
        raise ValueError(
            f"the checkpoint is of a {names[0]}, which transformers does not have: pass "
            "model_class=, that class or an Auto class that knows it"
        )
    return found


def _is_of_a_head(model: Any, key: str) -> bool:
    """Whether a tensor is of what a class puts on top of its base model."""
    return model.base_model is not model and _is_outside(model, key)


def _is_outside(model: Any, key: str) -> bool:
    """Whether a tensor of a checkpoint is not of the base model."""
    return not key.startswith(f"{model.base_model_prefix}.")


def _read_added(
    path: str | Path, hub: dict[str, Any], variant: str | None, record: dict[str, Any]
) -> dict[str, Tensor]:
    """The tensors that patch added, by their names in a patched model.

    From the files that transformers reads the others from: a single one where there is one, though
    shards of another save may lie beside it.
    """
    from safetensors import safe_open
    from transformers.utils import cached_file

    files = [cached_file(path, _of_variant(_SINGLE_FILE, variant), **hub, **_MAY_LACK)]
    if files == [None]:
        index = cached_file(path, _of_variant(_INDEX_FILE, variant), **hub)
        shard_of = json.loads(Path(index).read_text())["weight_map"]
        names = {name for key, name in shard_of.items() if own_name(record, key) is not None}
        files = [cached_file(path, name, **hub) for name in sorted(names)]
    tensors = {}
    for name in files:
        with safe_open(name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 -- not a dict
                own = own_name(record, key)
                if own is not None:
                    tensors[own] = file.get_tensor(key)
    return tensors


def _of_variant(name: str, variant: str | None) -> str:
    """The file that `save_pretrained(variant=...)` writes in the place of `name`."""
    stem, _, suffix = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{suffix}"


def _assign(model: Any, saved: dict[str, Tensor], record: dict[str, Any], *, cast: bool) -> None:
    """Put the saved tensors into the recorded layers; prefixes are those of the model saved."""
    names = record["layers"]
    keys: dict[str | None, dict[str, str]] = {}
    for key in saved:
        place, _, parameter = key.rpartition(".nsa.")
        keys.setdefault(_named(place, names), {})[parameter] = key
    left = dict.fromkeys(saved)
    for site in patched_sites(model):
        found = keys.get(_named(site.name, names), {})
        state = site.module.nsa.state_dict()
        missing = {f"{site.name}.nsa.{name}": None for name in state if name not in found}
        lacking = upstream_tensors(record, missing)
        if lacking:
            raise ValueError(f"the checkpoint lacks {', '.join(lacking)}")
        for name in [name for name in state if name in found]:  # in one order on all ranks
            tensor, own = saved[found[name]], state[name]
            whole = tensor.to(own.device, own.dtype if cast else tensor.dtype)
            state[name] = sharded_like(own, whole)
            left.pop(found[name])
        site.module.nsa.load_state_dict(state, assign=True)
    if left:
        raise ValueError(
            "the checkpoint has NSA tensors that no layer takes: "
            f"{', '.join(upstream_tensors(record, left))}; its "
            "config.json (num_hidden_layers, nsa_flex.layers) is of a model with other layers, as "
            "one was written whose layers were added or moved after patch: save it anew"
        )


def register_models() -> None:
    """Tell the Auto classes how to read the model types that patched models have on disk."""
    from transformers.models.auto import modeling_auto

    from nsa_flex.patching.hf_saved_config import checkpoint_configs

    for name in dir(modeling_auto):
        auto = getattr(modeling_auto, name)
        if name.startswith("AutoModel") and hasattr(auto, "_model_mapping"):
            for config_class in checkpoint_configs():
                known = {"auto_class": auto, "config_class": config_class}
                auto.register(config_class, type(f"NSA{name}", (_Reader,), known), exist_ok=True)


class _Reader:
    """Stands in an Auto class's table, where the class of the patched model would."""

    auto_class: ClassVar[Any]
    config_class: ClassVar[Any]

    @classmethod
    def from_pretrained(cls, path: Any, *, config: Any, **kwargs: Any) -> Any:
        return load(path, config=config, model_class=cls.auto_class, **kwargs)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "this is the config of a checkpoint of a patched model, which from_config would leave "
            "without its NSA layers: call nsa_flex.load(path); for fresh layers build the dense "
            "model from config.base, del its config.nsa_flex and call nsa_flex.patch"
        )
