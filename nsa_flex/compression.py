"""The map from l neighbouring keys (or values) to one compressed key (or value)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa_flex.config import CompressionKind, NSAConfig
from nsa_flex.sharded import fill

if TYPE_CHECKING:
    from jaxtyping import Float


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, the dtype itself otherwise."""
    return torch.promote_types(dtype, torch.float32)


def split_segments(x: Tensor, config: NSAConfig) -> Tensor:
    """(B, H, S, D) as the d-token segments that whole blocks are made of.

    Block i is segments i ... i + l/d - 1, so work done once a segment serves every block that
    contains it, and no overlapping windows are ever copied. Tokens past the last whole block
    are cut off; a sequence shorter than l + d is filled with zeros up to two blocks.

    Returns:
        (B, H, max(2, N) + l/d - 1, d, D), contiguous.
    """
    block, stride = config.compress_block_size, config.compress_stride
    two_blocks = block + stride
    num_segments = (max(x.shape[2], two_blocks) - block) // stride + block // stride
    # Traced, all lengths are filled up alike: a branch on the length is a second graph.
    if torch.compiler.is_compiling() or x.shape[2] < two_blocks:
        x = F.pad(x, (0, 0, 0, two_blocks))
    # The copy fuses away when compiled. Without it a graph is guarded on whether the cut left a
    # contiguous tensor, that is on whether d divides S, and every other length compiles anew.
    whole = x[:, :, : num_segments * stride].clone(memory_format=torch.contiguous_format)
    return whole.unflatten(2, (num_segments, stride))


def add_shifted(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over j of `parts[:, :, i + j, j]`: what each of its l/d segments gives to block i.

    Args:
        parts: (B, H, segments, l/d, X); entry [.., s, j, :] is what segment s contributes where
            it is the j-th of a block.
        dtype: of the sum.

    Returns:
        (B, H, segments - l/d + 1, X)
    """
    num_shifts = parts.shape[3]
    num_blocks = parts.shape[2] - num_shifts + 1
    total = parts[:, :, :num_blocks, 0].to(dtype)
    for shift in range(1, num_shifts):
        total = total + parts[:, :, shift : shift + num_blocks, shift].to(dtype)
    return total


def _sum_of_tokens(segments: Tensor) -> Tensor:
    """Sum over the d tokens of each segment (B, H, segments, d, D), in `_accumulation_dtype`.

    Compiled, four at a time: Inductor unrolls sums of fewer than eight terms into a kernel that
    reads as fast as memory allows, where its sum of 16 takes several times as long.
    """
    dtype = _accumulation_dtype(segments.dtype)
    if torch.compiler.is_compiling():
        for terms in (4, 2):
            while segments.shape[3] % terms == 0 and segments.shape[3] > terms:
                segments = segments.unflatten(3, (-1, terms)).sum(4, dtype=dtype)
    return segments.sum(3, dtype=dtype)


def mean_of_blocks(segments: Tensor, config: NSAConfig) -> Tensor:
    """Mean over the l tokens of each block, in float32 (float64 for float64).

    Args:
        segments: (B, H, segments, d, D) of `split_segments`.

    Returns:
        (B, H, N, D)
    """
    num_shifts = config.compress_block_size // config.compress_stride
    sums = _sum_of_tokens(segments)  # [B, H, segments, D]
    num_blocks = sums.shape[2] - num_shifts + 1
    total = sums[:, :, :num_blocks]
    for shift in range(1, num_shifts):
        total = total + sums[:, :, shift : shift + num_blocks]
    return total / config.compress_block_size


class Compression(nn.Module):
    r"""φ of the compressed branch (arXiv 2502.11089, eq. 7): l tokens become one.

    Block i summarises tokens [i·d, i·d + l). Only whole blocks exist,
    N = max(0, (S - l)//d + 1), and a block depends on nothing but its own l tokens. Every kind
    starts as the mean of the block, and every parameter of it has a gradient from the first
    step on. With x_p the block's token p:

    * `mean`: Σ_p x_p / l. No parameters.
    * `weighted`: Σ_p softmax(logits)_p x_p; `logits` (Hkv, l) start at 0.
    * `linear`: Σ_p x_p W_p; `weight` (Hkv, l, D, D) starts at identity / l.
    * `mlp`, the paper's, with an intra-block position embedding, shared by the KV heads as a
      learnable φ is in the paper (each head having its own would cost Hkv times the parameters):
      z = flatten(x + position), out = mean(x + position) + gelu(z A₁) C₁ - gelu(z A₂) C₂, with
      `position` (l, D) starting at 0, `hidden_weight` (2, l, D, D) = A and `output_weight`
      (2, D, D) = C. The two halves start equal, so the residual starts at exactly 0, while A and
      C are random and get (opposite) gradients. The hidden width is D a half: A then costs as
      much as one head's `linear`, 2·l·D² parameters, and C is negligible beside it.

    Sums run in float32 (float64 for float64 input), matrix products in the input's dtype with
    the accumulation of the device; parameters are cast to the input's dtype if they differ.

    Args:
        config: block size l, stride d, and the default `kind`.
        num_kv_heads: Hkv.
        head_dim: D, of what is compressed: D for keys, Dv for values.
        kind: one of mean, weighted, linear, mlp; `config.compression` if None.

    Raises:
        ValueError: `kind` is unknown, or a size is less than 1.

    >>> compress = Compression(NSAConfig(), num_kv_heads=2, head_dim=8)
    >>> compress(torch.randn(1, 2, 100, 8)).shape
    torch.Size([1, 2, 5, 8])
    """

    logits: Tensor
    weight: Tensor
    position: Tensor
    hidden_weight: Tensor
    output_weight: Tensor

    def __init__(
        self,
        config: NSAConfig,
        num_kv_heads: int,
        head_dim: int,
        kind: CompressionKind | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind = config.compression if kind is None else kind
        if kind not in get_args(CompressionKind):
            kinds = ", ".join(get_args(CompressionKind))
            raise ValueError(f"kind is {kind!r}; it must be one of {kinds}")
        for name, size in (("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        self.config = config
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.kind: CompressionKind = kind
        self.parameter_names = tuple(self._parameter_shapes())
        for name, shape in self._parameter_shapes().items():
            parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def _parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        heads, dim, block = self.num_kv_heads, self.head_dim, self.config.compress_block_size
        if self.kind == "weighted":
            return {"logits": (heads, block)}
        if self.kind == "linear":
            return {"weight": (heads, block, dim, dim)}
        if self.kind == "mlp":
            return {
                "position": (block, dim),
                "hidden_weight": (2, block, dim, dim),
                "output_weight": (2, dim, dim),
            }
        return {}

    def reset_parameters(self) -> None:
        """Set every parameter to its start, at which the output is the mean of each block.

        Sharded parameters (DTensors, of `fully_shard`) get their shards of the same start: every
        rank must call this.
        """
        for name, parameter in self.named_parameters(recurse=False):
            fill(parameter, self._start(name, parameter))

    def _start(self, name: str, like: Tensor) -> Tensor:
        """The whole start of the parameter called `name`, with dtype and device of `like`."""
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        block, dim = self.config.compress_block_size, self.head_dim
        if name == "weight":
            return torch.eye(dim, **options).div(block).expand(like.shape)
        if name in ("hidden_weight", "output_weight"):
            fan_in = block * dim if name == "hidden_weight" else dim
            half = torch.empty(like.shape[1:], **options).normal_(std=1 / math.sqrt(fan_in))
            return half.expand(like.shape)
        return torch.zeros(like.shape, **options)

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return (
            f"kind={self.kind!r}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"block_size={self.config.compress_block_size}, stride={self.config.compress_stride}"
        )

    def forward(self, x: Float[Tensor, "B Hkv S D"]) -> Float[Tensor, "B Hkv N D"]:
        """Compress each whole block of `x`.

        Args:
            x: (B, Hkv, S, D), keys after RoPE or values, any strides.

        Returns:
            (B, Hkv, max(2, N), D) in the dtype of `x`. Blocks that are not whole (of `x` filled
            up with zeros, when S < l + d) are for no query to see. There are always two, since
            torch.compile makes a graph of its own for a size of one.

        Raises:
            ValueError: `x` is not (B, Hkv, S, D) with this module's Hkv and D.
            TypeError: `x` is not floating point.
        """
        self._check(x)
        segments = split_segments(x, self.config)
        if self.kind == "weighted":
            blocks = self._weighted(segments)
        elif self.kind == "linear":
            blocks = self._linear(segments)
        elif self.kind == "mlp":
            blocks = self._mlp(segments)
        else:
            blocks = mean_of_blocks(segments, self.config)
        return blocks.to(x.dtype)

    def _check(self, x: Tensor) -> None:
        shape = tuple(x.shape)
        if x.dim() != 4 or shape[1] != self.num_kv_heads or shape[3] != self.head_dim:
            raise ValueError(
                f"x has shape {shape}; expected (batch, num_kv_heads={self.num_kv_heads}, "
                f"tokens, head_dim={self.head_dim})"
            )
        if not x.is_floating_point():
            raise TypeError(f"x has dtype {x.dtype}; expected a floating point dtype")

    def _weighted(self, segments: Tensor) -> Tensor:
        dtype = _accumulation_dtype(segments.dtype)
        weights = self.logits.to(dtype).softmax(-1)
        weights = weights.unflatten(1, (-1, self.config.compress_stride))  # [Hkv, l/d, d]
        wide = segments.to(dtype)
        # A product and a sum, not a matrix product: for l/d output rows it is bound by memory,
        # and Inductor turns it into one pass over the strided input without a copy.
        parts = [
            (wide * weights[:, None, shift, :, None]).sum(3) for shift in range(weights.shape[1])
        ]
        return add_shifted(torch.stack(parts, 3), dtype)

    def _linear(self, segments: Tensor) -> Tensor:
        stride, dim = self.config.compress_stride, self.head_dim
        weight = self.weight.to(segments.dtype).unflatten(1, (-1, stride))
        weight = weight.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)  # [Hkv, d·D, (l/d)·D]
        parts = torch.einsum("bhsk,hkn->bhsn", segments.flatten(3), weight)
        return add_shifted(parts.unflatten(3, (-1, dim)), _accumulation_dtype(segments.dtype))

    def _mlp(self, segments: Tensor) -> Tensor:
        dtype = _accumulation_dtype(segments.dtype)
        mean = mean_of_blocks(segments, self.config) + self.position.to(dtype).mean(0)
        hidden_1, change = self._hidden(segments).chunk(2, dim=-1)
        # One memory layout for both halves: a CPU's vector and scalar gelu differ in the last
        # bit, so equal numbers must meet the same one.
        hidden_1 = hidden_1.contiguous()
        hidden_2 = hidden_1 - change
        output_1, output_2 = self.output_weight.unbind()
        # gelu(h1) C1 - gelu(h2) C2, written in differences: while the halves are equal each term
        # is a product with exact zeros, in any dtype and for any order of summation.
        active_2 = F.gelu(hidden_2)
        factors = torch.cat((F.gelu(hidden_1) - active_2, active_2), dim=-1)
        matrix = torch.cat((output_1, output_1 - output_2), dim=0)
        residual = factors.to(segments.dtype) @ matrix.to(segments.dtype)
        return mean + residual.to(dtype)

    def _hidden(self, segments: Tensor) -> Tensor:
        """z A₁ and z (A₁ - A₂) side by side, (B, Hkv, N, 2·D), in the accumulation dtype."""
        stride, dim = self.config.compress_stride, self.head_dim
        first, second = self.hidden_weight.unbind()
        pair = torch.cat((first, first - second), dim=-1)  # [l, D, 2·D]
        weight = pair.to(segments.dtype).unflatten(0, (-1, stride)).permute(1, 2, 0, 3)
        parts = segments.flatten(3) @ weight.flatten(2).flatten(0, 1)
        dtype = _accumulation_dtype(segments.dtype)
        hidden = add_shifted(parts.unflatten(3, (-1, 2 * dim)), dtype)
        # The position embedding enters as position A, one row, not as l/d copies of the input.
        # A row, not a vector: vector @ matrix squeezes its product in place, which selective
        # checkpointing takes for a change of the mm result that it saved.
        row = self.position.to(pair.dtype).flatten()[None]
        return hidden + (row @ pair.flatten(0, 1)).to(dtype)
