"""What config.json says of a patched model, and of one that others trained: written and read.

On disk a patched model is of a model type and an architecture of its own, and names an attention
that transformers does not know. So transformers alone, and other readers of config.json, refuse it
where they would otherwise load a dense model and drop the trained tensors of NSA.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from nsa_flex.patching.formats import FORMATS, format_of

MODEL_TYPE = "nsa_flex"
# Named in transformers' error where a class of its own reads such a checkpoint.
_ATTENTION = "nsa_flex.load"
_FORMER = "nsa_flex_base"


def to_saved(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a patched model, from that of the model in memory."""
    known = format_of(config.get("nsa_flex", {}))
    if known is not None:
        return known.to_upstream(config)
    architectures = config.get("architectures") or []
    return {
        **config,
        "model_type": MODEL_TYPE,
        "architectures": [f"NSA{name}" for name in architectures],
        "attn_implementation": _ATTENTION,
        # Not "model_type": transformers takes a dict with its own type for the whole config.
        _FORMER: {"type": config["model_type"], "architectures": architectures},
    }


def from_saved(config: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `to_saved`; any other config as it is."""
    if config.get("model_type") in FORMATS:
        return FORMATS[config["model_type"]].from_upstream(config)
    if config.get("model_type") != MODEL_TYPE:
        return config
    former = config[_FORMER]
    kept = {k: v for k, v in config.items() if k not in ("attn_implementation", _FORMER)}
    return {**kept, "model_type": former["type"], "architectures": former["architectures"]}


def register() -> None:
    """Tell AutoConfig of the model types that patched models have on disk."""
    from transformers import AutoConfig  # whose own import calls this

    for config_class in checkpoint_configs():
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


class NSACheckpointConfig(PreTrainedConfig):
    """The config of a patched model, with the model type that it has on disk.

    `base` is the config that the model has in memory. All its attributes are here too, but for
    `architectures`, by which readers would look for the class of the dense model. What is set here
    is set there.
    """

    model_type = MODEL_TYPE
    auto_map: ClassVar[dict[str, str]] = {}  # readers look into it

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As of PreTrainedConfig."""
        return_unused = kwargs.pop("return_unused_kwargs", False)
        options = FORMATS[cls.model_type].OPTIONS if cls.model_type in FORMATS else ()
        said = {name: kwargs.pop(name) for name in options if name in kwargs}
        config_dict = {**config_dict, **said}
        base, unused = _base(from_saved(config_dict), kwargs)
        config = cls()
        architectures = config_dict.get("architectures")
        config.__dict__.update(vars(base), base=base, architectures=architectures)
        return (config, unused) if return_unused else config

    def __setattr__(self, name: str, value: Any) -> None:
        base = vars(self).get("base")
        if base is not None and name not in ("base", "architectures"):
            name = type(base).attribute_map.get(name, name)
            setattr(base, name, value)
        super().__setattr__(name, value)

    def __copy__(self) -> Any:
        twin = object.__new__(type(self))
        twin.__dict__.update(vars(self), base=copy.copy(self.base))
        return twin

    def to_json_file(self, *args: Any, **kwargs: Any) -> None:
        """Write what was read: `base` with its record."""
        self.base.to_json_file(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the class of `base` knows beyond the attributes."""
        if name.startswith("__") or "base" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(vars(self)["base"], name)


@functools.cache
def checkpoint_configs() -> tuple[type[NSACheckpointConfig], ...]:
    """The class for each model type on disk."""
    others = (
        type("NSACheckpointConfig", (NSACheckpointConfig,), {"model_type": name})
        for name in FORMATS
    )
    return (NSACheckpointConfig, *others)


def _base(config_dict: dict[str, Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from transformers import CONFIG_MAPPING

    model_type = config_dict["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"the checkpoint is of a patched model of type {model_type!r}, which this version of "
            "transformers does not know: load it with the version that wrote it"
        )
    config_class = CONFIG_MAPPING[model_type]
    return config_class.from_dict(config_dict, return_unused_kwargs=True, **kwargs)
