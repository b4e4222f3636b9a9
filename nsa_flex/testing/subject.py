"""The model under test: its inputs, its logits, and a twin of it that shares every tensor."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nsa_flex.config import NSAConfig
from nsa_flex.patching import NSALayer

# float32 parts (norms, rotary embeddings, routers) run inside models of float64 too.
TOLERANCE = 1024 * torch.finfo(torch.float32).eps  # 1.2e-4


class WrongNumbers(AssertionError):
    """A check found other numbers than it expects."""


@dataclass(frozen=True)
class Subject:
    """What every check is told.

    Args:
        config: NSA's sizes, from which the lengths follow.
        tokens: ids are drawn from [first, last).
        seed: of the random ids.
    """

    config: NSAConfig
    tokens: tuple[int, int]
    seed: int = 0

    @property
    def dense_length(self) -> int:
        """The longest sequence that the selected branch attends in full."""
        return self.config.num_selected_blocks * self.config.select_block_size

    @property
    def length(self) -> int:
        """Longer than that: blocks must be chosen, and the last one is partly filled."""
        return self.dense_length + self.config.select_block_size + 5

    def ids(self, batch: int, length: int, device: torch.device, salt: int = 0) -> Tensor:
        """Random token ids, int64 (batch, length); the same for the same arguments."""
        generator = torch.Generator().manual_seed(self.seed + salt)
        ids = torch.randint(*self.tokens, (batch, length), generator=generator)
        return ids.to(device)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter lies."""
    return next(model.parameters()).device


def logits(model: nn.Module, ids: Tensor, **inputs: Any) -> Tensor:
    """The model's logits for token ids, without gradients."""
    with torch.no_grad():
        return logits_of(model(ids, **inputs))


def logits_of(output: Any) -> Tensor:
    """A tensor as it is, an output's logits, or the first of a tuple."""
    if isinstance(output, Tensor):
        return output
    return output.logits if hasattr(output, "logits") else output[0]


def takes(model: nn.Module, name: str) -> bool:
    """Whether the model's forward has a parameter of that name."""
    return name in inspect.signature(model.forward).parameters


def expect_equal(found: Tensor, expected: Tensor, what: str) -> None:
    """WrongNumbers unless the relative error, in the norm, is within the tolerance."""
    difference = (found.double() - expected.double()).norm()
    error = float(difference / expected.double().norm().clamp(min=1e-30))
    if not error <= TOLERANCE:
        raise WrongNumbers(f"{what} differ by {error:.1e} (relative; {TOLERANCE:.1e} is allowed)")


def twin_of(model: nn.Module, *, own_configs: bool = False) -> Any:
    """A model of modules of its own around the same parameters, buffers and config objects.

    Args:
        own_configs: with copies of the configs instead.
    """
    shared = [*model.parameters(), *model.buffers()]
    if not own_configs:
        shared += _configs(model)
    return copy.deepcopy(model, {id(value): value for value in shared})


def token_range(model: Any) -> tuple[int, int]:
    """Ids of the vocabulary that are most likely ordinary tokens: (first, last + 1)."""
    configs = [config for config in _configs(model) if hasattr(config, "vocab_size")]
    if not configs:
        sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        if not sizes:
            raise ValueError(
                "model has no vocabulary that can be found: pass tokens=(first, last)"
            )
        return min(3, sizes[0] - 1), sizes[0]
    size = model.config.get_text_config().vocab_size
    special = [
        value
        for config in configs
        for name, value in vars(config).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    ]
    return 3, min([size, *(value for value in special if value > size // 2)])


def _configs(model: nn.Module) -> Iterator[Any]:
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, transformers.PreTrainedConfig):
                yield value


@torch.no_grad()
def scatter_added(model: nn.Module, seed: int) -> None:
    """Gates that depend on their input and a φ away from its start, on every patched layer."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, NSALayer):
            for parameter in layer.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * 0.2
                parameter.add_(noise.to(parameter))
