"""MiniCPM4-8B and MiniCPM4.1-8B: the model under upstream's names, and its sparse attention.

The modules are those of transformers' Llama and MiniCPM3 (the scales of embeddings, residuals and
logits); only which attention runs is said here. With a `sparse_config` that is InfLLM-V2, by the
attention implementation "nsa_flex", unless the caller names another, which then is dense
everywhere.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
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
from nsa_flex.patching.layer import AttentionShape
from nsa_flex.patching.minicpm_attention import KeptMeans
from nsa_flex.patching.minicpm_config import MiniCPM4Config, MiniCPMConfig, is_own


class MiniCPMAttention(LlamaAttention):
    """Llama's, with the sizes of `sparse_config` at hand.

    With `attn_use_rope` False and `attn_use_output_gate` True, that of the sparse layers of
    MiniCPM-SALA.
    """

    def __init__(self, config: MiniCPMConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.infllm = config.infllm()
        self.o_gate = None
        if config.attn_use_output_gate:
            self.o_gate = nn.Linear(config.hidden_size, self.o_proj.in_features, bias=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of Llama; sparse attention is told of a cache that grows."""
        if is_own(self.config) and self.config._attn_implementation in IMPLEMENTATIONS:
            kwargs["kept_means"] = KeptMeans.of_call(kwargs.get(CACHE), self.layer_idx)
        if self.o_gate is None and self.config.attn_use_rope:
            return super().forward(*args, **kwargs)
        return self._gated(*args, **kwargs)

    def _gated(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` of Llama, perhaps without rotary embedding, perhaps with a gate."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (
            project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in projections
        )
        if self.config.attn_use_rope:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        cache = kwargs.pop(CACHE, None)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            *(self, query, key, value, attention_mask),
            dropout=dropout,
            scaling=self.scaling,
            **kwargs,
        )
        output = output.flatten(2)
        if self.o_gate is not None:
            output = output * self.o_gate(hidden_states).sigmoid()
        return self.o_proj(output), weights


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

    @classmethod
    def from_pretrained(
        cls, path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """As of PreTrainedModel.

        Raises:
            ValueError: the checkpoint lacks tensors, or has some that the model does not take; or
                tensor parallelism over ranks that do not divide the KV heads.
        """
        model, report = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        # What `patch` added is read by `nsa_flex.load`; a model without a head leaves one out.
        beside = (".nsa.",) if hasattr(model, "lm_head") else (".nsa.", "lm_head.")
        for kind, what in (("missing", "lacks"), ("unexpected", "has more tensors:")):
            names = sorted(
                key for key in report[f"{kind}_keys"] if not any(part in key for part in beside)
            )
            if names:
                raise ValueError(f"the checkpoint {what} {', '.join(names)}")
        if model.tp_size:
            from nsa_flex.patching.split_heads import check_heads_divide

            sizes = model.config
            heads = (sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim)
            shape = AttentionShape(sizes.hidden_size, *heads)
            check_heads_divide("each layer", shape, model.tp_size, "tensor parallelism")
        return (model, report) if output_loading_info else model


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


class MiniCPM4ForCausalLM(MiniCPMForCausalLM):
    """The same for the model type minicpm4."""

    config: MiniCPM4Config
    config_class = MiniCPM4Config


class MiniCPM4Model(MiniCPMModel):
    """The same for the model type minicpm4."""

    config: MiniCPM4Config
    config_class = MiniCPM4Config
