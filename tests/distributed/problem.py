"""A tiny patched Llama, a batch, and the loss and gradients that one process finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import nsa_flex
from nsa_flex.sharded import is_sharded
from patching.tiny_models import NSA, tiny_model, tokens
from reference.accuracy import assert_close, to_float64

Group = dist.ProcessGroup | None

ROWS = 4  # on all ranks together
# More than n * l' tokens each, so that blocks are chosen among many.
LENGTH = {"cpu": 72, "cuda": 640}
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
# On a GPU as large as the kernels ask for.
# transformers 5.17 splits no vocabulary of an odd size.
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"vocab_size": 98},
    "cuda": {"vocab_size": 98, "hidden_size": 256, "head_dim": 64},
}
CUDA = nsa_flex.NSAConfig(num_selected_blocks=5, window_size=128, compression="mlp")
CONFIG = {"cpu": NSA, "cuda": CUDA}


@dataclass(frozen=True)
class Result:
    """Loss and gradients (by the parameter's name) of one step."""

    loss: Tensor
    gradients: Mapping[str, Tensor]


def new_model(device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """For `device`, but not on it; the same random weights everywhere, φ and gates included.

    As `patch` leaves φ, it is a mean: then a position of keys shifts all logits of a query alike,
    and its gradient is 0.
    """
    torch.manual_seed(1)
    dense = tiny_model(tie_word_embeddings=True, **SIZES[device.type]).train()
    model = nsa_flex.patch(dense, CONFIG[device.type])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".nsa." in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(DTYPE[device.type] if dtype is None else dtype)


def whole_batch(device: torch.device, *, rows: int = ROWS, seed: int = 2) -> Tensor:
    """int64 (rows, LENGTH) on `device`, the same everywhere."""
    torch.manual_seed(seed)
    return tokens(rows, LENGTH[device.type]).to(device)


def own_rows(batch: Tensor, group: Group = None) -> Tensor:
    """This rank's share of a batch."""
    return batch.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean nats a token; every row has as many."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def whole(x: Tensor) -> Tensor:
    """All of a tensor, sharded or not."""
    return x.full_tensor() if is_sharded(x) else x  # type: ignore[attr-defined]


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod.", "module."):
        name = name.replace(wrapper, "")
    return name


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of every parameter; none is missing."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[plain_name(name)] = whole(parameter.grad).detach().clone()
    return found


def one_process(device: torch.device, dtype: torch.dtype | None = None) -> Result:
    """The whole batch at once, eagerly; in float64 on the CPU."""
    place = torch.device("cpu") if dtype == torch.float64 else device
    model = new_model(device, dtype).to(place)
    loss = loss_of(model, whole_batch(device).to(place))
    loss.backward()
    return Result(loss.detach(), gradients(model))


def mean_over_ranks(loss: Tensor, group: Group = None) -> Tensor:
    """The loss of the whole batch: every rank has as many tokens."""
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def assert_equal(case: str, found: Result, plain: Result, exact: Result) -> None:
    """Holds `found` to float64 by the error rule, one eager process being the yardstick."""
    dtype = next(iter(plain.gradients.values())).dtype
    assert_close(f"{case}: loss", found.loss, to_float64(exact.loss), plain.loss, dtype)
    assert found.gradients.keys() == exact.gradients.keys(), case
    for name, gradient in found.gradients.items():
        assert_close(
            f"{case}: gradient of {name}",
            gradient,
            to_float64(exact.gradients[name]),
            plain.gradients[name],
            dtype,
        )
