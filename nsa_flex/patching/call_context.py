"""What attention must know of the call that it is part of, handed down in keyword arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from nsa_flex.joined import JoinedInput
from nsa_flex.patching.rows import Rows


class CallContext(NamedTuple):
    """One call of a patched decoder: the keyword argument `nsa_call`.

    rows: padding, packed documents or cached keys, where keys and values come whole.
    cache: transformers cache whose `LayerCache`s have the keys and were told of the padding, or
        None; then `rows` moves nothing.
    passed: names of the arguments that the caller of the decoder passed.
    paged: the engine's batch and pages if continuous batching calls, else None; then there is
        neither `rows` nor `cache`.
    full_masks: whether masks of the former implementation are made for full attention, because
        some layers with full attention are unpatched.
    """

    rows: Rows = Rows()
    cache: Any = None
    passed: tuple[str, ...] = ()
    full_masks: bool = False
    paged: Any = None


class LayerInput(NamedTuple):
    """What a patched attention module was called with: the keyword argument `nsa_input`.

    hidden_states: (B, S, E), from which the gates come.
    attention_mask: as the module got it.
    joined: what stands for the input in the module's own projections, with the logits of the
        gates; or None.
    """

    hidden_states: Tensor
    attention_mask: Any
    joined: JoinedInput | None = None
