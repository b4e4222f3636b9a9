"""How transformers initialises the weights of a patched decoder: `model.init_weights()`.

It asks the model's `_init_weights` about each module, children before parents, and that knows φ
and gates as little as other modules of which transformers has no class. So patched decoders get a
`_init_weights` of their own.
"""

from __future__ import annotations

import functools

from torch import nn

from nsa_flex.compression import Compression
from nsa_flex.gates import Gates
from nsa_flex.patching.hf_layers import Decoder
from nsa_flex.patching.layer import NSALayer


def install(decoder: Decoder) -> None:
    """Let `init_weights` of `decoder`, or of a model that holds it, start φ and gates right."""
    decoder._init_weights = functools.partial(_init_weights, decoder)
    for layer in decoder.modules():
        if isinstance(layer, NSALayer):
            _mark_initialized(layer)


def remove(decoder: Decoder) -> None:
    """Undo `install`."""
    del decoder._init_weights


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
