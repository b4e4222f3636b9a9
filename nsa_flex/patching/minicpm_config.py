"""Configs of MiniCPM4 checkpoints as they were published: model types minicpm and minicpm4.

Where transformers has a model type itself, its own classes read it. Nothing here needs the
modelling code of transformers.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from nsa_flex.infllm import InfLLMV2Config

_MODEL_TYPES = ("minicpm", "minicpm4")


class MiniCPMConfig(PreTrainedConfig):
    """A Llama's config by its names, with MiniCPM's scales and InfLLM-V2's `sparse_config`.

    Args:
        scale_emb: factor of the input embeddings.
        scale_depth: divided by the square root of the number of layers, factor of what each
            attention and MLP adds to the residual stream.
        dim_model_base: hidden states are divided by hidden_size / dim_model_base before the head.
        sparse_config: sizes by the names of `InfLLMV2Config`; None for dense attention.
        attn_use_rope: rotary embeddings turn queries and keys, as in all but MiniCPM-SALA's.
        attn_use_output_gate: `o_gate`, a projection of a layer's input, says by its sigmoid how
            much of attention's output goes into `o_proj`, as in the sparse layers of MiniCPM-SALA.

    Raises:
        ValueError: a sparse_config that InfLLMV2Config refuses, use_nope among others; or experts.
    """

    model_type = "minicpm"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.1
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False
    scale_emb: int | float = 1
    scale_depth: int | float = 1
    dim_model_base: int = 1
    sparse_config: dict[str, Any] | None = None
    attn_use_rope: bool = True
    attn_use_output_gate: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        # As of Llama; the gate goes with the heads whose output it gates.
        gate = ["self_attn.o_gate"] if self.attn_use_output_gate else []
        columns = [*(f"self_attn.{x}_proj" for x in "qkv"), *gate, "mlp.gate_proj", "mlp.up_proj"]
        self.base_model_tp_plan = {
            **{f"layers.*.{name}": "colwise" for name in columns},
            **{f"layers.*.{name}": "rowwise" for name in ("self_attn.o_proj", "mlp.down_proj")},
        }
        super().__post_init__(**kwargs)
        if getattr(self, "num_experts", 0):
            raise ValueError(
                f"num_experts={self.num_experts}: MiniCPM models with experts are not supported"
            )
        sizes = self.infllm()
        if sizes is not None and sizes.use_nope:
            raise ValueError(
                "sparse_config has use_nope=True, which the published checkpoints do not: the "
                "model caches no keys before the rotary embedding; call "
                "nsa_flex.infllm_v2_attention with scored_by"
            )

    def infllm(self) -> InfLLMV2Config | None:
        """`sparse_config`, checked; None for dense attention."""
        return None if self.sparse_config is None else InfLLMV2Config.from_dict(self.sparse_config)

    @property
    def residual_scale(self) -> float:
        """Factor of what each attention and MLP adds."""
        return self.scale_depth / self.num_hidden_layers**0.5

    @property
    def logits_scaling(self) -> float:
        """Divides hidden states before the head."""
        return self.hidden_size / self.dim_model_base

    def with_used_factors(self) -> MiniCPMConfig:
        """The config that rotary embeddings are made of: a copy where the factors are others.

        Upstream fills its table of angles up to max_position_embeddings at once. Where that is
        more than the original length, the long factors are used from the first token on.
        """
        rope = dict(self.rope_parameters or {})
        if rope.get("rope_type") != "longrope":
            return self
        if self.max_position_embeddings <= rope["original_max_position_embeddings"]:
            return self
        config = copy.copy(self)
        config.rope_parameters = {**rope, "short_factor": rope["long_factor"]}
        return config


class MiniCPM4Config(MiniCPMConfig):
    """The same under the model type that transformers plans, with MiniCPM4-8B's sizes."""

    model_type = "minicpm4"

    vocab_size: int = 73448
    intermediate_size: int = 16384
    num_key_value_heads: int | None = 2
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False
    scale_emb: int | float = 12
    scale_depth: int | float = 1.4
    dim_model_base: int = 256


class MiniCPMSALAConfig(PreTrainedConfig):
    """Stands in AutoConfig's table to refuse MiniCPM-SALA by name."""

    model_type = "minicpm_sala"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        raise ValueError(
            "MiniCPM-SALA is not supported: most of its layers are lightning attention "
            "(mixer_types), which nsa_flex does not compute; for its sparse layers alone take "
            "nsa_flex.patching.minicpm.MiniCPMAttention, with attn_use_rope=False and "
            "attn_use_output_gate=True in a MiniCPMConfig"
        )


def own_configs() -> list[type[MiniCPMConfig]]:
    """The classes for model types that this transformers does not have."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    both = (MiniCPMConfig, MiniCPM4Config)
    return [each for each in both if each.model_type not in CONFIG_MAPPING_NAMES]


def register() -> None:
    """Tell AutoConfig of them."""
    from transformers import AutoConfig  # whose own import calls this
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for config_class in own_configs():
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    if MiniCPMSALAConfig.model_type not in CONFIG_MAPPING_NAMES:
        AutoConfig.register(MiniCPMSALAConfig.model_type, MiniCPMSALAConfig, exist_ok=True)


def is_own(config: Any) -> bool:
    """Whether the config is of a MiniCPM4 with sparse attention that no `patch` changed.

    Of transformers' class too, once there is one.
    """
    return (
        getattr(config, "model_type", "") in _MODEL_TYPES
        and getattr(config, "sparse_config", None) is not None
        and getattr(config, "nsa_flex", None) is None
    )
