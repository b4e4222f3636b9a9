"""Parallelism over the tokens of a sequence, around a patched decoder: refused by name."""

from __future__ import annotations

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nsa_flex.patching.hf_attention import attention_forward
from nsa_flex.sharded import refuse_context_parallel


def refuse_parallelism(implementation: str) -> None:
    """That a call of a decoder sees whole sequences; asked at each, since it may begin any time.

    Args:
        implementation: the decoder's name among transformers' ALL_ATTENTION_FUNCTIONS.

    Raises:
        ValueError: inside torch's `context_parallel`; or something stands in the place of the
            function that this package registered, as Ulysses sequence parallelism does.
    """
    refuse_context_parallel()
    found = ALL_ATTENTION_FUNCTIONS.get(implementation)
    if found is not attention_forward:
        name = getattr(found, "__qualname__", type(found).__name__)
        raise ValueError(
            f"transformers' ALL_ATTENTION_FUNCTIONS has {name} for {implementation!r}, as "
            "Ulysses sequence parallelism (DeepSpeed's UlyssesSPAttentionHF, accelerate's "
            "sp_size) wraps it, and NSA needs whole sequences with all heads: sequence "
            "parallelism is not supported yet; run without it"
        )
