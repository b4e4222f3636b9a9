"""What NSA adds to one attention layer of an existing model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nsa_flex.attention import nsa_attention
from nsa_flex.cache.columns import IncomingBatch
from nsa_flex.cache.layer import LayerCache, advance
from nsa_flex.compression import Compression, branched, compress_what_is_read
from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import Backend
from nsa_flex.gates import GateInit, Gates, gates_of_step
from nsa_flex.joined import JoinedInput
from nsa_flex.paging import LayerPages, NewTokens, PagedBatch, PagedLayer, attend
from nsa_flex.parallel import SequenceShards, context_parallel_attention
from nsa_flex.parallel.heads import HeadShards
from nsa_flex.patching.rows import Rows


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention layer.

    Args:
        hidden_size: E, width of the layer's input.
        num_query_heads: Hq.
        num_kv_heads: Hkv; divides Hq.
        head_dim: D, of queries and keys.
        value_head_dim: Dv; D if None.

    Raises:
        ValueError: a size is less than 1, or Hkv does not divide Hq.
    """

    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None = None

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"num_query_heads={self.num_query_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )


class NSALayer(nn.Module):
    """The learned parts of NSA in one layer (φ of keys and values, gates), and its attention.

    `patch` registers one as `nsa` on every attention module that it changes, so that all new
    parameters are named `...nsa.*`. An adapter calls it with its queries, keys and values.

    Args:
        shape: sizes of the layer.
        config: NSA's block sizes, counts and window.
        init: "paper", "dense" or "unbiased", where the gates start (see `Gates`).
        backend: passed to `nsa_attention`.
    """

    # Of `context_parallel`: rows are shards of sequences then.
    shards: SequenceShards | None = None
    kv_heads_at_once: int | None = None
    # Of `sequence_parallel`; calls that it holds for are told by their rows.
    head_shards: HeadShards | None = None

    def __init__(
        self,
        shape: AttentionShape,
        config: NSAConfig,
        *,
        init: GateInit = "paper",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.config = config
        self.init: GateInit = init
        self.backend = backend
        value_dim = shape.head_dim if shape.value_head_dim is None else shape.value_head_dim
        self.compress_key = Compression(
            config, shape.num_kv_heads, shape.head_dim, device=device, dtype=dtype
        )
        self.compress_value = Compression(
            config, shape.num_kv_heads, value_dim, device=device, dtype=dtype
        )
        self.gates = Gates(
            shape.hidden_size,
            shape.num_query_heads,
            init=init,
            branches=config.branches,
            device=device,
            dtype=dtype,
        )

    def forward(
        self,
        hidden_states: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        rows: Rows | None = None,
        cache: LayerCache | None = None,
        stored: bool = False,
        joined: JoinedInput | None = None,
        paged: tuple[LayerPages, PagedBatch] | None = None,
    ) -> Tensor:
        """NSA of queries against keys and values.

        Args:
            hidden_states: (B, Sq, E), the layer's input, from which the gates come.
            query: (B, Hq, Sq, D), after position embedding; taken in the dtype of `value`.
            key: (B, Hkv, Sk, D), after position embedding, cached tokens first (with `cache` the
                new tokens alone); likewise.
            value: (B, Hkv, Sk, Dv).
            scale: factor of query . key; 1/√D if None.
            rows: padding, packed documents or cached keys (`packed_rows`, `padded_rows`); None
                where each row is one document whose last Sq tokens are the queries.
            cache: of `new_cache`; keys and values are added to it. Of padding it is told by
                `cache.expect`, not by `rows`.
            stored: whether the caller called `cache.update`, gives what it returned as `key` and
                `value`, and counts the tokens afterwards (`advance`).
            joined: of `joined_input`, if keys and values come from it; without a cache.
            paged: pages of this layer, which keys and values are added to, and whose the tokens
                are: those of several requests in one row.

        Returns:
            (B, Hq, Sq, Dv) in the dtype of `value`.

        Raises:
            ValueError: both `rows` and `cache` are given, or the tokens do not fit the cache; or,
                in `context_parallel`, a cache, or `rows` that move tokens.
        """
        if self.shards is not None:
            self._check_shards(rows, cache, paged)
        if paged is not None:
            return self._attend_pages(hidden_states, query, key, value, *paged, scale)
        if cache is not None:
            if rows is not None:
                raise ValueError("rows and cache were both given: tell the cache of padding")
            if stored:
                return self._attend_cached(hidden_states, query, key, value, cache, scale)
            if not torch.compiler.is_compiling():  # which cannot compare
                cache.use_phi(self.compress_key, self.compress_value)
            if cache.incoming is None:
                cache.expect(IncomingBatch(query.shape[2]))
            assert cache.incoming is not None
            key, value = cache.update(key, value)
            output = self._attend_cached(hidden_states, query, key, value, cache, scale)
            advance([cache], cache.incoming)
            return output
        rows = Rows() if rows is None else rows
        if joined is None:
            gates = self.gates(hidden_states)
        else:
            gates = self.gates.of_product(joined.gate_logits, hidden_states.dtype)
        # Under autocast rotary embeddings leave queries and keys in float32, values in half.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if self.shards is not None:
            return context_parallel_attention(
                *(query, key, value, gates, self.compress_key, self.compress_value),
                mesh=self.shards,
                config=self.config,
                scale=scale,
                backend=self.backend,
                document_start=rows.shard_start,
                kv_heads_at_once=self.kv_heads_at_once,
            )
        compress_key, compress_value = self.compress_key, self.compress_value
        if rows.head_shards is not None:
            gates = rows.head_shards.gather_tokens(gates)
            heads = rows.head_shards.own_heads(self.shape.num_kv_heads)
            compress_key, compress_value = (
                each.of_heads(heads) for each in (compress_key, compress_value)
            )
        if rows.keys is not None:
            key, value = rows.keys.align(key), rows.keys.align(value)
        if rows.queries is not None:
            query, gates = rows.queries.align(query), rows.queries.align(gates)
        (key, source_key), (value, source_value) = branched(key), branched(value)
        output = nsa_attention(
            query,
            key,
            value,
            *compress_what_is_read(compress_key, compress_value, source_key, source_value),
            gates,
            config=self.config,
            scale=scale,
            backend=self.backend,
            query_offset=rows.query_offset,
            document_start=None if rows.queries is None else rows.queries.start,
            max_document_length=None if rows.queries is None else rows.queries.max_document_length,
        )
        return output if rows.queries is None else rows.queries.restore(output)

    def _check_shards(
        self,
        rows: Rows | None,
        cache: LayerCache | None,
        paged: tuple[LayerPages, PagedBatch] | None,
    ) -> None:
        if cache is not None or paged is not None:
            raise ValueError(
                "a cache in nsa_flex.context_parallel is not supported yet: leave it out"
            )
        moves = (None,) if rows is None else (rows.queries, rows.keys, rows.query_offset)
        if any(x is not None for x in moves):
            raise ValueError(
                "rows move tokens, and this rank has a shard of them: lay padding and documents "
                "out before sequences are shared out, as nsa_flex.shard_batch does"
            )

    def _attend_cached(
        self,
        hidden_states: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        scale: float | None,
    ) -> Tensor:
        """NSA of the tokens that `cache.update` took in last and gave `key` and `value` for."""
        is_step = cache.is_step(query.shape[2], self.backend)
        gates = gates_of_step(self.gates, hidden_states) if is_step else self.gates(hidden_states)
        output, _ = cache.attend(query, key, value, gates, scale=scale, backend=self.backend)
        return output

    def _attend_pages(
        self,
        hidden_states: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pages: LayerPages,
        batch: PagedBatch,
        scale: float | None,
    ) -> Tensor:
        """NSA of the new tokens (1, H, T, D) of several requests, stored in pages on the way."""
        gates = self.gates(hidden_states)
        new = NewTokens(query.to(value.dtype), key.to(value.dtype), value, gates)
        layer = PagedLayer(pages, self.compress_key, self.compress_value, self.backend)
        return attend(layer, new, batch, query.shape[-1] ** -0.5 if scale is None else scale)

    def new_cache(self, *, max_length: int | None = None) -> LayerCache:
        """An empty cache for this layer; static with room for `max_length` tokens, or growing."""
        return LayerCache(self.compress_key, self.compress_value, max_length=max_length)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"init={self.init!r}, backend={self.backend!r}"


def layer_of(module: nn.Module) -> NSALayer | None:
    """The NSA layer of a patched attention module; None if it is not patched.

    PEFT's `modules_to_save=["nsa"]` puts a wrapper in its place, with a copy for each adapter:
    then this is the layer that was wrapped. Calls, and attributes that adapters change, go through
    `module.nsa`, which is the copy in force.
    """
    layer = getattr(module, "nsa", None)
    while layer is not None and not isinstance(layer, NSALayer):
        layer = getattr(layer, "original_module", None)
    return layer
