"""transformers' Auto classes read checkpoints of patched models, as `nsa_flex.load` does."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.auto import modeling_auto

from nsa_flex.patching.checkpoint import load
from nsa_flex.patching.hf_checkpoint_config import checkpoint_configs


def register() -> None:
    """Tell the Auto classes how to read the model types that patched models have on disk."""
    for name in dir(modeling_auto):
        auto = getattr(modeling_auto, name)
        if name.startswith("AutoModel") and hasattr(auto, "_model_mapping"):
            for config_class in checkpoint_configs():
                what = {"auto_class": auto, "config_class": config_class}
                auto.register(config_class, type(f"NSA{name}", (_Reader,), what), exist_ok=True)


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
