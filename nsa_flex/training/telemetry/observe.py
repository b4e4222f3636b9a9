"""What each NSA layer does with a batch: an extra forward, without gradients, outside the graphs.

The compiled code of the training step stays as it is: nothing is added to it, so that telemetry
breaks no graph and costs nothing between measurements.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import nsa_flex.module
import nsa_flex.parallel.attention
import nsa_flex.patching.layer
from nsa_flex.backends.branch import Inputs
from nsa_flex.config import BRANCHES, NSAConfig
from nsa_flex.dispatch import CUDA_ORDER, BranchName, Choice, choose_backends
from nsa_flex.documents import align_packed
from nsa_flex.module import NSAAttention
from nsa_flex.parallel import SequenceShards
from nsa_flex.patching import NSALayer
from nsa_flex.training.block_mass import selection_recall
from nsa_flex.training.telemetry.schemas import columns

# What compilation and activation checkpointing put into the names of modules.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")

Probe = Mapping[str, Any] | Tensor | Callable[[], Any]


@dataclass(frozen=True)
class Observation:
    """One call of a layer's attention core.

    name: of the module in the model.
    config: of the layer.
    gates: (B, Hq, S, C), of the config's branches.
    blocks: int32 (B, Hkv, S, n), the chosen ones, ascending, -1 where there are fewer; None
        without a selected branch.
    document_start: int (B, S), first token of each query's document, or None.
    real: bool (B, S), false at places that alignment filled; None where all are real.
    choices: the backends that the same call with gradients takes.
    recall: float32 (2,) of `selection_recall`; NaN without a selected branch, and where ranks
        share the tokens, none of which has all queries.
    """

    name: str
    config: NSAConfig
    gates: Tensor
    blocks: Tensor | None
    document_start: Tensor | None
    real: Tensor | None
    choices: Mapping[BranchName, Choice]
    recall: Tensor


def nsa_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The NSA layers of a model by name: what `patch` added, and `NSAAttention` modules.

    Names are those that the model has before it is wrapped and compiled.
    """
    return {
        _plain(name): module
        for name, module in unwrapped(model).named_modules()
        if isinstance(module, (NSALayer, NSAAttention))
    }


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile, or `model` itself."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def probe_call(model: nn.Module, probe: Probe) -> Callable[[], Any]:
    """What runs the model on `probe`: a batch of keyword arguments, a tensor, or a function.

    Raises:
        ValueError: the batch has padding, which the statistics would count.
    """
    if callable(probe) and not isinstance(probe, Tensor):
        return probe
    # Not through DDP, whose forward broadcasts buffers: a collective of all ranks.
    model = unwrapped(model)
    batch: dict[str, Any] = {"input_ids": probe} if isinstance(probe, Tensor) else dict(probe)
    mask = batch.pop("attention_mask", None)
    if isinstance(mask, Tensor) and not bool((mask != 0).all()):
        raise ValueError(
            "the probe's attention_mask has padding, which the statistics would count: pass rows "
            "without padding"
        )
    if getattr(getattr(model, "config", None), "use_cache", None) is not None:
        batch["use_cache"] = False
    if isinstance(probe, Tensor) and "use_cache" not in batch:
        return lambda: model(probe)
    if "labels" not in batch:
        batch = without_logits(model) | batch
    return lambda: model(**batch)


def without_logits(model: nn.Module) -> dict[str, Any]:
    """Arguments with which a language model computes logits of the last token alone, or none."""
    knows = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": 1} if knows else {}


def observe(model: nn.Module, call: Callable[[], Any]) -> list[Observation]:
    """Call `call` once, eagerly and without gradients; one entry for each NSA call of `model`.

    The model is in eval mode meanwhile. Its parameters, buffers that training changes and torch's
    random states are as they were afterwards.
    """
    found: list[Observation] = []
    training = {module: module.training for module in model.modules()}
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        model.eval()
        with (
            torch.random.fork_rng(devices),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            _watched(model, found),
        ):
            call()
    finally:
        for module, mode in training.items():
            module.training = mode
    return found


@contextlib.contextmanager
def _watched(model: nn.Module, found: list[Observation]) -> Iterator[None]:
    """Within, note every call of `nsa_attention`, and by which layer."""
    current: dict[str, Any] = {}
    modules: tuple[Any, ...] = (nsa_flex.module, nsa_flex.patching.layer)
    homes: tuple[Any, ...] = (*modules, nsa_flex.parallel.attention)
    attention_over_ranks = nsa_flex.patching.layer.context_parallel_attention
    attention = nsa_flex.patching.layer.nsa_attention

    def noting(*tensors: Tensor, return_aux: bool = False, **options: Any) -> Any:
        out, aux = attention(*tensors, return_aux=True, **options)
        found.append(_observation(current, tensors, aux.blocks, options))
        return (out, aux) if return_aux else out

    def entering(name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            current.update(name=name, real=_real_places(module, args, kwargs))

        return hook

    def noting_shards(query: Tensor, *tensors: Any, **options: Any) -> Tensor:
        chunks = len(found)
        out = attention_over_ranks(query, *tensors, **options)
        found[chunks:] = [_whole(found[chunks:], tensors[2], options)]
        return out

    handles = [
        module.register_forward_pre_hook(entering(name), with_kwargs=True)
        for name, module in nsa_layers(model).items()
    ]
    for home in homes:
        home.nsa_attention = noting
    for home in modules:
        home.context_parallel_attention = noting_shards
    try:
        yield
    finally:
        for home in homes:
            home.nsa_attention = attention
        for home in modules:
            home.context_parallel_attention = attention_over_ranks
        for handle in handles:
            handle.remove()


def _observation(
    current: dict[str, Any],
    tensors: tuple[Any, ...],
    blocks: Tensor | None,
    options: dict[str, Any],
) -> Observation:
    query, key, value, *_, gates = tensors
    own = [options.get(name) for name in ("sliding_key", "sliding_value")]
    sliding_key, sliding_value = (
        x if y is None else y for x, y in zip((key, value), own, strict=True)
    )
    # Dispatch looks at no compressed tensor, of which some may be None.
    inputs = Inputs(query, key, value, key, value, sliding_key, sliding_value, gates)
    config, start = options["config"], options.get("document_start")
    facts = inputs.facts(config, options.get("query_offset"), start)
    choices = choose_backends(replace(facts, needs_grad=True), options.get("backend", "auto"))
    real, recall = current["real"], gates.new_full((2,), torch.nan, dtype=torch.float32)
    if blocks is not None and options.get("query_offset") is None:
        scale = options.get("scale") or query.shape[-1] ** -0.5
        recall = selection_recall(query, key, blocks, config, scale, start=start, real=real)
    return Observation(current["name"], config, gates, blocks, start, real, choices, recall)


def _whole(calls: list[Observation], gates: Tensor, options: dict[str, Any]) -> Observation:
    """Of a layer whose sequences are shared: what one process would see, from all ranks.

    Args:
        calls: of this rank's two chunks, the head and the tail, for some KV heads after others.
        gates: of this rank. options: of `context_parallel_attention`.
    """
    shards = SequenceShards.of(options["mesh"])
    blocks, start = None, options.get("document_start")
    if calls[0].blocks is not None:
        chunks: list[Any] = [x.blocks for x in calls]
        heads = [torch.cat(chunks[i : i + 2], 2) for i in range(0, len(chunks), 2)]
        blocks = shards.gather(torch.cat(heads, 1))[0]
    if start is not None:
        start = shards.gather(start[:, None, :, None])[0][:, 0, :, 0]
    # The tail attends the most keys.
    return replace(calls[-1], gates=shards.gather(gates)[0], blocks=blocks, document_start=start)


def _real_places(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Bool (1, S'): where packed documents, once aligned, have a token; None without documents."""
    layout = None
    if isinstance(module, NSALayer):
        rows = kwargs.get("rows")
        layout = None if rows is None else rows.queries
    elif kwargs.get("cu_seqlens") is not None:
        x = args[0] if args else kwargs["x"]
        layout = align_packed(kwargs["cu_seqlens"], x.shape[1], module.config)
    if layout is None:
        return None
    real = torch.zeros_like(layout.source, dtype=torch.bool)
    real.view(-1)[layout.target.flatten()] = True
    return real


# Reasons of a choice that stands for itself: asked for, or measured to be the fastest.
_MEANT = ("asked for", "fastest here by nsa-flex tune")


def is_fallback(choice: Choice) -> bool:
    """Whether another backend runs than the table's first, and nobody asked for it."""
    return choice.backend != CUDA_ORDER[choice.branch][0] and choice.reason not in _MEANT


def counted(seen: Iterable[Observation], calls: int) -> list[dict[str, Any]]:
    """Rows of fallback_counters.csv, but for session and step.

    Args:
        seen: one entry a layer.
        calls: forward calls of the model since the rows before.
    """
    layers = Counter(choice for each in seen for choice in each.choices.values())
    return [
        {
            "branch": choice.branch,
            "backend": choice.backend,
            "first": CUDA_ORDER[choice.branch][0],
            "fallback": int(is_fallback(choice)),
            "layers": count,
            "calls": calls * count,
            "reason": choice.reason,
        }
        for choice, count in layers.items()
    ]


def check_strict(seen: Iterable[Observation]) -> None:
    """Raise ValueError if a layer would not run on the first backend of the table."""
    for each in seen:
        for choice in each.choices.values():
            if is_fallback(choice):
                raise ValueError(
                    f"strict: the {choice.branch} branch of {each.name} runs on {choice.backend}, "
                    f"expected {CUDA_ORDER[choice.branch][0]} ({choice.reason}); "
                    "change what the reason names, or pass strict=False"
                )


def backends_of(seen: Iterable[Observation]) -> dict[str, str]:
    """Branch to its backend, several joined by a slash."""
    found: dict[str, list[str]] = {}
    for each in seen:
        for branch, choice in each.choices.items():
            if choice.backend not in found.setdefault(branch, []):
                found[branch].append(choice.backend)
    return {branch: "/".join(names) for branch, names in found.items()}


STATISTICS = columns("gates")[3:]


def statistics(seen: Observation) -> Tensor:
    """float32 (len(STATISTICS),): the columns of gates.csv; NaN where there is nothing to average.

    Nothing is read on the host.
    """
    gates = _gates(seen)
    return torch.cat([*gates, *_blocks(seen), seen.recall]).float()


def _gates(seen: Observation) -> list[Tensor]:
    gates = _of_every_branch(seen).float()  # [B, Hq, S, 3]
    weight = torch.ones_like(gates[:, 0, :, 0]) if seen.real is None else seen.real.float()
    weight = weight[:, None].expand(gates.shape[:3])  # [B, Hq, S]
    total = weight.sum()

    def mean(x: Tensor) -> Tensor:
        return (x * weight).sum() / total

    size = gates.abs()
    share = size / size.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    return [
        torch.stack([mean(gates[..., branch]) for branch in range(3)]),
        torch.stack([mean(share[..., branch]) for branch in range(3)]),
        torch.stack(
            [
                mean(entropy),
                mean((gates < 0.01).float().mean(-1)),
                mean((gates > 0.99).float().mean(-1)),
            ]
        ),
    ]


def _of_every_branch(seen: Observation) -> Tensor:
    """Gates (B, Hq, S, 3), 0 of absent branches."""
    if seen.config.branches == BRANCHES:
        return seen.gates
    gates = seen.gates.new_zeros((*seen.gates.shape[:3], len(BRANCHES)))
    gates[..., [BRANCHES.index(name) for name in seen.config.branches]] = seen.gates
    return gates


def _blocks(seen: Observation) -> list[Tensor]:
    """Share of never chosen blocks, and mean distance of the chosen; forced blocks left out."""
    config, blocks = seen.config, seen.blocks
    if blocks is None:  # nothing is selected
        return [seen.gates.new_full((2,), torch.nan)]
    batch, heads, tokens, _ = blocks.shape
    size = config.select_block_size
    place = torch.arange(tokens, device=blocks.device)
    own = (place // size)[None, None, :, None]  # [1, 1, S, 1]
    start = seen.document_start
    first = torch.zeros_like(own) if start is None else (start // size)[:, None, :, None]
    free = (blocks >= first + config.num_initial_blocks) & (
        blocks <= own - config.num_local_blocks
    )  # [B, Hkv, S, n]
    if seen.real is not None:
        free &= seen.real[:, None, :, None]
    distance = torch.where(free, own - blocks, 0).sum() * size / free.sum()
    num_blocks = config.num_select_blocks(tokens)
    counts = torch.zeros(batch, heads, num_blocks, device=blocks.device)
    index = blocks.clamp(min=0).flatten(2).long()
    counts.scatter_add_(2, index, free.flatten(2).float())
    candidate = _candidates(seen, config, num_blocks, batch)[:, None]  # [B, 1, blocks]
    never = (candidate & (counts == 0)).sum() / (candidate.sum() * heads)
    return [never[None], distance[None]]


def _candidates(seen: Observation, config: NSAConfig, num_blocks: int, batch: int) -> Tensor:
    """Bool (B, blocks): blocks that a real query of the document may choose freely."""
    size, local = config.select_block_size, config.num_local_blocks
    device = seen.gates.device
    block = torch.arange(num_blocks, device=device)
    later = (block + local).clamp(max=num_blocks - 1)  # the first query that may choose it
    inside = (block + local < num_blocks).expand(batch, num_blocks)
    if seen.document_start is None:
        return inside & (block >= config.num_initial_blocks)
    first = seen.document_start[:, ::size] // size  # [B, blocks]
    inside = inside & (first[:, later] == first) & (block - first >= config.num_initial_blocks)
    return inside if seen.real is None else inside & seen.real[:, ::size][:, later]
