"""MiniCPM4-8B and MiniCPM4.1-8B: the model under upstream's names, and its sparse attention.

The modules are those of transformers' Llama and MiniCPM3 (the scales of embeddings, residuals and
logits); only which attention runs is said here. With a `sparse_config` that is InfLLM-V2, by the
attention implementation "nsa_flex", unless the caller names another, which then is dense
everywhere.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.minicpm3.modeling_minicpm3 import (
    MiniCPM3DecoderLayer,
    MiniCPM3ForCausalLM,
    MiniCPM3Model,
    MiniCPM3PreTrainedModel,
    MiniCPM3ScaledWordEmbedding,
)

from nsa_flex.patching.hf_layers import IMPLEMENTATIONS, refuse_continuous_batching
from nsa_flex.patching.hf_versions import CACHE
from nsa_flex.patching.minicpm_attention import KeptMeans
from nsa_flex.patching.minicpm_config import MiniCPM4Config, MiniCPMConfig, is_own


class MiniCPMAttention(LlamaAttention):
    """Llama's, with the sizes of `sparse_config` at hand."""

    def __init__(self, config: MiniCPMConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.infllm = config.infllm()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of Llama; sparse attention is told of a cache that grows."""
        if is_own(self.config) and self.config._attn_implementation in IMPLEMENTATIONS:
            kwargs["kept_means"] = KeptMeans.of_call(kwargs.get(CACHE), self.layer_idx)
        return super().forward(*args, **kwargs)


class MiniCPMDecoderLayer(MiniCPM3DecoderLayer):
    """Scales what attention and MLP add; the attention is not MiniCPM3's."""

    def __init__(self, config: MiniCPMConfig, layer_idx: int) -> None:
        GradientCheckpointingLayer.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = MiniCPMAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.residual_scale = config.residual_scale


class MiniCPMPreTrainedModel(MiniCPM3PreTrainedModel):
    """What the classes share: which attention runs if nobody names one."""

    config: MiniCPMConfig
    config_class = MiniCPMConfig
    _no_split_modules = ("MiniCPMDecoderLayer",)
    _can_record_outputs = {  # noqa: RUF012 -- as transformers declares it
        "hidden_states": MiniCPMDecoderLayer,
        "attentions": MiniCPMAttention,
    }

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        from nsa_flex.patching import hf_attention  # transformers knows the name from then on

        if attn_implementation is None and is_own(self.config):
            attn_implementation = hf_attention.IMPLEMENTATIONS[0]
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)


class MiniCPMModel(MiniCPMPreTrainedModel, MiniCPM3Model):
    """Embeddings, layers and the last norm."""

    def __init__(self, config: MiniCPMConfig) -> None:
        MiniCPM3PreTrainedModel.__init__(self, config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = MiniCPM3ScaledWordEmbedding(
            config.vocab_size, config.hidden_size, self.padding_idx, embed_scale=config.scale_emb
        )
        layers = [MiniCPMDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config.with_used_factors())
        self.gradient_checkpointing = False
        self.post_init()


class MiniCPMForCausalLM(MiniCPMPreTrainedModel, MiniCPM3ForCausalLM):
    """The language model, by the name that upstream's config.json has."""

    def __init__(self, config: MiniCPMConfig) -> None:
        MiniCPM3PreTrainedModel.__init__(self, config)
        self.model = MiniCPMModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As of GenerationMixin; ValueError with sparse attention."""
        if is_own(self.config):
            refuse_continuous_batching(self)
        return super().init_continuous_batching(*args, **kwargs)

    @classmethod
    def from_pretrained(
        cls, path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """As of PreTrainedModel.

        Raises:
            ValueError: the checkpoint lacks tensors, or has some that the model does not take.
        """
        model, report = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        for kind, what in (("missing", "lacks"), ("unexpected", "has more tensors:")):
            names = ", ".join(sorted(report[f"{kind}_keys"]))
            if names:
                raise ValueError(f"the checkpoint {what} {names}")
        return (model, report) if output_loading_info else model


class MiniCPM4ForCausalLM(MiniCPMForCausalLM):
    """The same for the model type minicpm4."""

    config: MiniCPM4Config
    config_class = MiniCPM4Config


class MiniCPM4Model(MiniCPMModel):
    """The same for the model type minicpm4."""

    config: MiniCPM4Config
    config_class = MiniCPM4Config
