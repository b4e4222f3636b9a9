"""The calls that are rehearsed: one of `nsa_attention`, and one of a layer with a cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nsa_flex import decoding
from nsa_flex.attention import nsa_attention
from nsa_flex.backends.branch import Inputs, is_whole
from nsa_flex.cache.columns import IncomingBatch
from nsa_flex.cache.layer import LayerCache
from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import Backend, BranchName, Choice, choose_backends
from nsa_flex.explaining.explanation import KernelRun, Kernels
from nsa_flex.explaining.rehearsal import Launch, rehearsing, twin
from nsa_flex.installed import HAS_TRITON

if TYPE_CHECKING:
    from nsa_flex.fallback_kernels.fused.route import Route

Choices = dict[BranchName, Choice]


@dataclass(frozen=True)
class AttentionCall:
    """A call of `nsa_attention`, whose compressed keys and gates follow from the rest.

    tensors: query, key, value. own: key and value of the sliding branch, if not those.
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    own: tuple[Tensor, Tensor] | None
    config: NSAConfig
    backend: Backend
    query_offset: int | Tensor | None
    document_start: Tensor | None
    max_document_length: int | None
    needs_grad: bool
    is_fused: bool

    def route(self) -> Route | None:
        """Within a rehearsal, that of the core operator; None where branches run one by one."""
        if not self.is_fused:
            return None
        from nsa_flex.fallback_kernels.fused.route import rounded_length, route_of

        query, key, value = (twin(x) for x in self.tensors)
        longest = self.max_document_length if query.shape[2] == key.shape[2] else None
        return route_of(
            *(query, key, value, self.config),
            documents=self.document_start is not None,
            max_document_length=None if longest is None else rounded_length(longest, self.config),
            differentiable=self.needs_grad,
            has_offset=not self.needs_grad and not is_whole(query, key, self.query_offset),
            own_window_keys=self.own is not None,
        )

    def output(self) -> Tensor:
        """The output of the call, within a rehearsal."""
        query, key, value = (self._input(twin(x)) for x in self.tensors)
        num_blocks = self.config.num_compressed_blocks(key.shape[2])
        compressed_key, compressed_value = (
            self._input(x.new_empty((*x.shape[:2], num_blocks, x.shape[3]))) for x in (key, value)
        )
        sliding_key, sliding_value = self.own or (None, None)
        offset, start = self.query_offset, self.document_start
        return nsa_attention(
            query,
            key,
            value,
            compressed_key,
            compressed_value,
            self._input(_empty_gates(query, self.config)),
            config=self.config,
            backend=self.backend,
            sliding_key=None if sliding_key is None else self._input(twin(sliding_key)),
            sliding_value=None if sliding_value is None else self._input(twin(sliding_value)),
            query_offset=twin(offset) if isinstance(offset, Tensor) else offset,
            document_start=None if start is None else twin(start),
            max_document_length=self.max_document_length,
        )

    def _input(self, x: Tensor) -> Tensor:
        return x.detach().requires_grad_(self.needs_grad)


def kernels_of(call: AttentionCall, device: torch.device) -> Kernels:
    """The kernels of a call if its tensors were on `device`, with its backward if it needs one."""
    if device.type != "cuda" or not HAS_TRITON:
        return Kernels()
    with torch.set_grad_enabled(call.needs_grad), rehearsing(device) as rehearsed:
        out = call.output()
        num_forward = len(rehearsed.launches)
        if call.needs_grad:
            out.backward(torch.empty_like(out))
        route = call.route()
    forward, backward = rehearsed.launches[:num_forward], rehearsed.launches[num_forward:]
    return Kernels(_runs(forward), _runs(backward), tuple(rehearsed.reasons), route)


def rehearse_cached(
    query: Tensor, cache: LayerCache, backend: Backend, device: torch.device
) -> tuple[Choices, Kernels]:
    """Backends and kernels of storing and attending as many new tokens as there are queries."""
    with torch.no_grad(), rehearsing(device) as rehearsed:
        layer, query = cache.twin(device, twin), twin(query)
        layer.expect(IncomingBatch(query.shape[2]))
        key, value = (
            query.new_empty(
                (query.shape[0], layer.num_sets * phi.num_kv_heads, query.shape[2], phi.head_dim)
            )
            for phi in (layer.compress_key, layer.compress_value)
        )
        key, value = layer.update(key, value)
        choices = _cached_choices(layer, query, key, value, backend)
        if device.type != "cuda":  # where kernels are told of
            return choices, Kernels()
        gates = _empty_gates(query, layer.config)
        layer.attend(query, key, value, gates, backend=backend)
    return choices, Kernels(_runs(rehearsed.launches), (), tuple(rehearsed.reasons))


def _empty_gates(query: Tensor, config: NSAConfig) -> Tensor:
    return query.new_empty((*query.shape[:3], len(config.branches)))


def _cached_choices(
    layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, asked: Backend
) -> Choices:
    """The backends of `layer.attend` with such arguments."""
    if not layer.is_step(query.shape[2], asked):
        inputs = Inputs(query, key, value, key, value, key, value, gates=query)
        return choose_backends(inputs.facts(layer.config, layer.query_offset(), None), asked)
    buffers = layer.buffers
    tensors = (query, buffers.key, buffers.value)
    problem = decoding.unsupported_reason(*tensors, layer.config, layer.num_sets)
    what = f"a decode step, at most {decoding.MAX_STEP} new tokens over a cache"
    backend, why = "triton", what
    if problem is not None:
        backend, why = "dense", f"{what}; not triton: {problem}"
    return {branch: Choice(branch, backend, why) for branch in layer.config.branches}


def _runs(launches: list[Launch]) -> tuple[KernelRun, ...]:
    times = Counter(launches)
    return tuple(KernelRun(launch.kernel, launch.stage, times[launch]) for launch in times)
