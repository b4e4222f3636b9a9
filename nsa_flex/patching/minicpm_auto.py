"""transformers' Auto classes read MiniCPM4 checkpoints; the model is imported when asked for."""

from __future__ import annotations

from typing import Any

from nsa_flex.patching.minicpm_config import own_configs


def register() -> None:
    """Tell the Auto classes of models of these configs."""
    from transformers import AutoModel, AutoModelForCausalLM  # whose own import calls this

    for config_class in own_configs():
        family = config_class.__name__.removesuffix("Config")
        for auto, name in ((AutoModel, "Model"), (AutoModelForCausalLM, "ForCausalLM")):
            what = {"config_class": config_class}
            auto.register(config_class, type(family + name, (_Later,), what), exist_ok=True)


class _Later:
    """Stands in an Auto class's table: the class of its name is imported when it is called for.

    Its module imports modelling code of transformers, which takes seconds.
    """

    @classmethod
    def _model_class(cls) -> Any:
        from nsa_flex.patching import minicpm

        return getattr(minicpm, cls.__name__)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._model_class().from_pretrained(*args, **kwargs)

    @classmethod
    def _from_config(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._model_class()._from_config(*args, **kwargs)
