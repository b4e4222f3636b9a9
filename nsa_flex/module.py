"""NSA as a layer: projections, rotary embedding, compression, gates and the three branches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nsa_flex.attention import BranchLSE, NSAAux, nsa_attention
from nsa_flex.cache.columns import IncomingBatch, incoming_batch
from nsa_flex.cache.layer import LayerCache, advance
from nsa_flex.compression import Compression, branched, compress_what_is_read
from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import Backend
from nsa_flex.documents import (
    DocumentLayout,
    align_packed,
    align_padded,
    checked_bounds,
    real_positions,
)
from nsa_flex.gates import GateInit, Gates, gates_of_step
from nsa_flex.parallel import SequenceShards, ShardedCache, context_parallel_attention
from nsa_flex.rotary import apply_rotary, rotary_cos_sin

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped


class NSAAttention(nn.Module):
    """Self-attention by Native Sparse Attention, a drop-in for a causal attention layer.

    q, k, v = linear maps of x; q and k are rotated; the compressed keys and values are φ of the
    rotated keys and of the values; out = (Σ_c g_c · branch_c) W_o. Compressing after the rotation
    keeps one meaning for every φ that starts as the mean: a block's logit starts as the mean of
    its tokens' logits.

    Args:
        hidden_size: E, width of input and output.
        num_query_heads: Hq.
        num_kv_heads: Hkv, a divisor of Hq.
        head_dim: D of queries and keys; hidden_size / num_query_heads if None.
        value_head_dim: Dv; D if None.
        config: sizes of the branches and kind of φ; the paper's if None.
        rope_theta: base of the rotary wavelengths, None for no rotation.
        separate_branch_kv: the paper's independent keys and values of each branch: the k and v
            projections yield three sets, in the order compressed, selected, sliding.
        bias: of the four projections.
        backend: as of `nsa_attention`.
        gate_init: "paper" starts with gates ½, "dense" with (0, 1, 0), see `Gates`.

    Raises:
        ValueError: sizes that do not fit, or an unknown `gate_init`.

    >>> layer = NSAAttention(64, num_query_heads=4, num_kv_heads=2)
    >>> layer(torch.randn(1, 100, 64)).shape
    torch.Size([1, 100, 64])
    """

    # Of `context_parallel`: rows are shards of sequences then.
    shards: SequenceShards | None = None
    kv_heads_at_once: int | None = None

    def __init__(
        self,
        hidden_size: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int | None = None,
        *,
        value_head_dim: int | None = None,
        config: NSAConfig | None = None,
        rope_theta: float | None = 10000.0,
        separate_branch_kv: bool = False,
        bias: bool = False,
        backend: Backend = "auto",
        gate_init: GateInit = "paper",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        head_dim = _checked_head_dim(
            hidden_size, num_query_heads, num_kv_heads, head_dim, rotary=rope_theta is not None
        )
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        if value_head_dim < 1:
            raise ValueError(f"value_head_dim={value_head_dim} must be at least 1")
        if rope_theta is not None and not 0 < rope_theta < math.inf:
            raise ValueError(
                f"rope_theta={rope_theta} must be positive and finite, or None for no rotation"
            )
        self.hidden_size = hidden_size
        self.num_query_heads = num_query_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.value_head_dim = value_head_dim
        self.config = NSAConfig() if config is None else config
        # A float attribute is a symbolic input under dynamic=True, which makes torch compile the
        # layer twice; an int is not.
        if rope_theta is not None and rope_theta == int(rope_theta):
            rope_theta = int(rope_theta)
        self.rope_theta = rope_theta
        self.separate_branch_kv = separate_branch_kv
        self.backend = backend

        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        kv_sets = 3 if separate_branch_kv else 1
        self.q_proj = nn.Linear(hidden_size, num_query_heads * head_dim, bias, **placed)
        self.k_proj = nn.Linear(hidden_size, kv_sets * num_kv_heads * head_dim, bias, **placed)
        self.v_proj = nn.Linear(
            hidden_size, kv_sets * num_kv_heads * value_head_dim, bias, **placed
        )
        self.o_proj = nn.Linear(num_query_heads * value_head_dim, hidden_size, bias, **placed)
        self.compress_key = Compression(self.config, num_kv_heads, head_dim, **placed)
        self.compress_value = Compression(self.config, num_kv_heads, value_head_dim, **placed)
        self.gates = Gates(
            hidden_size, num_query_heads, init=gate_init, branches=self.config.branches, **placed
        )

    def reset_parameters(self) -> None:
        """Start over: torch's linear initialisation, φ at the mean, gates at `gate_init`."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            projection.reset_parameters()
        self.compress_key.reset_parameters()
        self.compress_value.reset_parameters()
        self.gates.reset_parameters()

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return (
            f"num_query_heads={self.num_query_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, value_head_dim={self.value_head_dim}, "
            f"rope_theta={self.rope_theta}, separate_branch_kv={self.separate_branch_kv}, "
            f"backend={self.backend!r}"
        )

    def forward(
        self,
        x: Float[Tensor, "B S E"],
        *,
        positions: Shaped[Tensor, "*rows S"] | None = None,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
        max_document_length: int | None = None,
        attention_mask: Shaped[Tensor, "B S"] | None = None,
        cache: LayerCache | ShardedCache | None = None,
        return_aux: bool = False,
    ) -> Tensor | tuple[Tensor, NSAAux]:
        """Attend causally within each row, or within each document.

        Args:
            x: (B, S, E).
            positions: (S,) or (B, S), what the rotary embedding rotates by. By default the place
                of a token in its row, or in its document, or behind the padding on its left.
                They have no say in what is visible, and are not checked: a shard of a sequence
                with its own positions attends to itself alone, see `context_parallel`.
            cu_seqlens: int (M + 1,), starts of M documents packed into the one row of x, then S.
                Each is computed as if it were alone. In `context_parallel` those of the whole
                row, the same on every rank, in multiples of `select_block_size`.
            max_document_length: tokens of the longest of these documents, if the host knows. Up to
                n * l' nothing needs to be scored or selected. A longer document raises an error
                on the device.
            attention_mask: (B, S), nonzero at real tokens, which are adjacent; padding on the
                left or right. Each row is computed as its real tokens alone.
            cache: of `new_cache`: the tokens of x follow those it holds, and are added to it.
                Positions then go on from the tokens of each row. In `context_parallel` a
                `ShardedCache`: x is a shard of the prompt if it is empty, else new tokens, the
                same on every rank.
            return_aux: also return the chosen blocks and the log-sum-exps.

        Returns:
            (B, S, E) in the dtype of x, 0 at padding tokens. With `return_aux` a pair with
            `NSAAux`, whose blocks are counted from the start of the token's document; at padding
            tokens its values mean nothing.

        Raises:
            ValueError: a shape does not fit x, two of cu_seqlens, attention_mask and (with
                cu_seqlens) cache are given, or x does not fit the cache, which is then as it was.
        """
        self._check(x, positions, cu_seqlens, attention_mask)
        if max_document_length is not None and cu_seqlens is None:
            raise ValueError(
                f"max_document_length={max_document_length} was given without cu_seqlens: pass "
                "both, or leave it out"
            )
        if self.shards is not None:
            refused = {
                "attention_mask": attention_mask is not None,
                "cache": cache is not None and not isinstance(cache, ShardedCache),
                "return_aux": return_aux,
            }
            for name in (name for name, given in refused.items() if given):
                raise ValueError(
                    f"{name} in nsa_flex.context_parallel is not supported: each rank has a shard "
                    "of the tokens"
                )
            sharded = cache if isinstance(cache, ShardedCache) else None
            if sharded is not None and not sharded.is_empty:
                return self._step_over_ranks(x, positions, sharded)
            bounds = None
            if cu_seqlens is not None:
                whole = x.shape[1] * self.shards.size
                bounds = checked_bounds(cu_seqlens, whole, max_document_length)
            return self._attend_shards(x, positions, bounds, self.shards, sharded)
        if isinstance(cache, ShardedCache):
            raise ValueError("a ShardedCache needs nsa_flex.context_parallel(layer, mesh) first")
        if cache is not None:
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens and cache were both given: cache one document a row")
            out, aux = self._attend_cached(x, positions, attention_mask, cache, return_aux)
            return out if aux is None else (out, aux)
        layout = self._layout(x, cu_seqlens, max_document_length, attention_mask)
        out, aux = self._attend(x, positions, layout, return_aux)
        if attention_mask is not None:
            out = out.masked_fill((attention_mask == 0)[:, :, None], 0)
        return out if aux is None else (out, aux)

    def new_cache(self, *, max_length: int | None = None) -> LayerCache:
        """An empty cache for this layer; static with room for `max_length` tokens, or growing."""
        return LayerCache(
            self.compress_key,
            self.compress_value,
            max_length=max_length,
            num_sets=3 if self.separate_branch_kv else 1,
        )

    def _attend_cached(
        self,
        x: Tensor,
        positions: Tensor | None,
        attention_mask: Tensor | None,
        cache: LayerCache,
        return_aux: bool,
    ) -> tuple[Tensor, NSAAux | None]:
        incoming = (
            IncomingBatch(x.shape[1]) if attention_mask is None else incoming_batch(attention_mask)
        )
        if cache.is_initialized and x.shape[0] != cache.batch_size:
            raise ValueError(f"x has {x.shape[0]} rows, the cache holds {cache.batch_size}")
        if cache.is_initialized and x.device != cache.device:
            raise ValueError(f"x is on {x.device}, the cache on {cache.device}: move one")
        if not torch.compiler.is_compiling():  # which cannot compare
            cache.use_phi(self.compress_key, self.compress_value)
        cache.expect(incoming)
        if positions is None:
            positions = self._next_positions(x, attention_mask, cache)
        query, keys, values = self._project(x, positions)
        keys, values = cache.update(keys, values)
        is_step = cache.is_step(x.shape[1], self.backend)
        gates = gates_of_step(self.gates, x) if is_step else self.gates(x)
        out, aux = cache.attend(
            query, keys, values, gates, backend=self.backend, return_aux=return_aux
        )
        advance([cache], incoming)
        if attention_mask is not None:
            cache.columns.tell_last(attention_mask != 0)
        if aux is not None and incoming.layout is not None:
            aux = _restore_aux(aux, incoming.layout, self.config)
        out = self.o_proj(out.transpose(1, 2).flatten(2))
        if attention_mask is not None:
            out = out.masked_fill((attention_mask == 0)[:, :, None], 0)
        return out, aux

    def _next_positions(
        self, x: Tensor, attention_mask: Tensor | None, cache: LayerCache
    ) -> Tensor:
        """Position of each new token in its row, (S,) or (B, S)."""
        if attention_mask is None:
            place = torch.arange(x.shape[1], device=x.device)
        else:
            place = real_positions(attention_mask)
        return place + cache.lengths[:, None] if cache.is_initialized else place

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, S, D), the first two rotated."""
        query = self._heads(self.q_proj(x), self.head_dim)
        keys = self._heads(self.k_proj(x), self.head_dim)
        values = self._heads(self.v_proj(x), self.value_head_dim)
        if self.rope_theta is not None:
            cos, sin = rotary_cos_sin(positions, self.head_dim, self.rope_theta)
            query, keys = apply_rotary(query, cos, sin), apply_rotary(keys, cos, sin)
        return query, keys, values

    def _step_over_ranks(self, x: Tensor, positions: Tensor | None, cache: ShardedCache) -> Tensor:
        """`x` (B, T, E) are new tokens, the same on every rank."""
        positions = cache.positions(x.shape[1]) if positions is None else positions
        (query, keys, values), gates = self._project(x, positions), self.gates(x)
        out = cache.step(query, keys, values, gates)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _attend_shards(
        self,
        x: Tensor,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        shards: SequenceShards,
        cache: ShardedCache | None,
    ) -> Tensor:
        """`x` (B, T, E) is this rank's shard; `cu_seqlens` are places in the whole row."""
        places, start = shards.positions(x.shape[1], x.device), None
        if cu_seqlens is not None:
            first = cu_seqlens[:-1]
            torch._assert_async(
                (first % self.config.select_block_size == 0).all(),
                "cu_seqlens in nsa_flex.context_parallel: documents must begin at multiples of "
                "select_block_size, as nsa_flex.shard_batch lays them out",
            )
            start = first[torch.searchsorted(first, places, right=True) - 1][None]
        if positions is None:
            positions = places if start is None else places - start[0]
        (query, keys, values), gates = self._project(x, positions), self.gates(x)
        if cache is not None:
            cache.fill_from_shards(keys, values)
        compressed_key, key, sliding_key = self._branches(keys)
        compressed_value, value, sliding_value = self._branches(values)
        own_window = self.separate_branch_kv
        out = context_parallel_attention(
            *(query, key, value, gates, self.compress_key, self.compress_value),
            mesh=shards,
            config=self.config,
            backend=self.backend,
            compressed_source=(compressed_key, compressed_value),
            sliding_key=sliding_key if own_window else None,
            sliding_value=sliding_value if own_window else None,
            document_start=start,
            kv_heads_at_once=self.kv_heads_at_once,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _attend(
        self,
        x: Tensor,
        positions: Tensor | None,
        layout: DocumentLayout | None,
        return_aux: bool,
    ) -> tuple[Tensor, NSAAux | None]:
        if positions is None:
            plain = torch.arange(x.shape[1], device=x.device)
            positions = plain if layout is None else layout.positions
        (query, keys, values), gates = self._project(x, positions), self.gates(x)
        if layout is not None:
            # Behind the projections, which then see no unused slots. The rotation before it and
            # this move are one pass over memory when compiled.
            query, keys, values, gates = map(layout.align, (query, keys, values, gates))
        compressed_key, key, sliding_key = self._branches(keys)
        compressed_value, value, sliding_value = self._branches(values)
        result = nsa_attention(  # type: ignore[call-overload]  # there is none for bool
            query,
            key,
            value,
            *compress_what_is_read(
                self.compress_key, self.compress_value, compressed_key, compressed_value
            ),
            gates,
            config=self.config,
            backend=self.backend,
            sliding_key=sliding_key,
            sliding_value=sliding_value,
            document_start=None if layout is None else layout.start,
            max_document_length=None if layout is None else layout.max_document_length,
            return_aux=return_aux,
        )
        out, aux = result if isinstance(result, tuple) else (result, None)
        if layout is not None:
            out = layout.restore(out)
            aux = None if aux is None else _restore_aux(aux, layout, self.config)
        return self.o_proj(out.transpose(1, 2).flatten(2)), aux

    def _heads(self, features: Tensor, head_dim: int) -> Tensor:
        """(B, S, H · head_dim) -> (B, H, S, head_dim), a view."""
        return features.unflatten(2, (-1, head_dim)).transpose(1, 2)

    def _branches(self, x: Tensor) -> tuple[Tensor, ...]:
        """Keys or values of the compressed, the selected and the sliding branch."""
        if self.separate_branch_kv:
            return x.chunk(3, dim=1)
        shared, compressed = branched(x)
        return compressed, shared, shared

    def _layout(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None,
        max_document_length: int | None,
        attention_mask: Tensor | None,
    ) -> DocumentLayout | None:
        if cu_seqlens is not None:
            return align_packed(cu_seqlens, x.shape[1], self.config, max_document_length)
        return None if attention_mask is None else align_padded(attention_mask)

    def _check(
        self,
        x: Tensor,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        attention_mask: Tensor | None,
    ) -> None:
        if x.dim() != 3 or x.shape[2] != self.hidden_size:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; "
                f"expected (batch, tokens, hidden_size={self.hidden_size})"
            )
        batch, tokens = x.shape[:2]
        if tokens < 1:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected at least one token")
        if cu_seqlens is not None and attention_mask is not None:
            raise ValueError(
                "cu_seqlens and attention_mask were both given; pass packed documents or a "
                "padded batch, not both"
            )
        if cu_seqlens is not None and batch != 1:
            raise ValueError(
                f"x has {batch} rows; cu_seqlens needs one row that holds all documents: "
                "reshape x to (1, batch * tokens, hidden_size)"
            )
        if attention_mask is not None and tuple(attention_mask.shape) != (batch, tokens):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; expected (batch, "
                f"tokens) = ({batch}, {tokens}), nonzero at real tokens"
            )
        if positions is not None and tuple(positions.shape) not in (
            (tokens,),
            (1, tokens),
            (batch, tokens),
        ):
            raise ValueError(
                f"positions has shape {tuple(positions.shape)}; expected (tokens,) = ({tokens},) "
                f"or (batch, tokens) = ({batch}, {tokens})"
            )


def _restore_aux(aux: NSAAux, layout: DocumentLayout, config: NSAConfig) -> NSAAux:
    """Rows back at their tokens, blocks counted from the start of the token's document."""
    blocks = aux.blocks
    if layout.start is not None and blocks is not None:
        first = (layout.start // config.select_block_size)[:, None, :, None]
        blocks = torch.where(blocks < 0, blocks, blocks - first)
    lse = (x if x is None else layout.restore(x[..., None]).squeeze(-1) for x in aux.lse)
    return NSAAux(blocks if blocks is None else layout.restore(blocks), BranchLSE(*lse))


def _checked_head_dim(
    hidden_size: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int | None,
    *,
    rotary: bool,
) -> int:
    sizes = {
        "hidden_size": hidden_size,
        "num_query_heads": num_query_heads,
        "num_kv_heads": num_kv_heads,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if num_query_heads % num_kv_heads:
        raise ValueError(
            f"num_query_heads={num_query_heads} must be a multiple of num_kv_heads={num_kv_heads}"
        )
    if head_dim is None:
        if hidden_size % num_query_heads:
            raise ValueError(
                f"hidden_size={hidden_size} is not a multiple of "
                f"num_query_heads={num_query_heads}: pass head_dim"
            )
        head_dim = hidden_size // num_query_heads
    if head_dim < 1:
        raise ValueError(f"head_dim={head_dim} must be at least 1")
    if rotary and head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even for rotation, or rope_theta None")
    return head_dim
