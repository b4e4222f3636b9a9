"""The map from l neighbouring keys (or values) to one compressed key (or value)."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa_flex.config import CompressionKind, NSAConfig, checked_int
from nsa_flex.plain_modules import is_plain_module
from nsa_flex.sharded import fill, of_rank

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
    # The copy fuses away when compiled. Without it a graph is guarded on whether the cut left a
    # contiguous tensor, that is on whether d divides S, and every other length compiles anew.
    whole = _whole_segments(x, config).clone(memory_format=torch.contiguous_format)
    return whole.unflatten(-2, (-1, config.compress_stride))


def _split_both(key: Tensor, value: Tensor, config: NSAConfig) -> Tensor:
    """`split_segments` of keys and of values in one tensor, (2, B, H, segments, d, D)."""
    # Stacking is the copy.
    both = torch.stack([_whole_segments(x, config) for x in (key, value)])
    return both.unflatten(-2, (-1, config.compress_stride))


def _whole_segments(x: Tensor, config: NSAConfig) -> Tensor:
    """The tokens of (B, H, S, D) that `split_segments` splits, not copied."""
    block, stride = config.compress_block_size, config.compress_stride
    two_blocks = block + stride
    num_segments = (max(x.shape[2], two_blocks) - block) // stride + block // stride
    # Traced, all lengths are filled up alike: a branch on the length is a second graph.
    if torch.compiler.is_compiling() or x.shape[2] < two_blocks:
        x = F.pad(x, (0, 0, 0, two_blocks))
    return x[:, :, : num_segments * stride]


def branched(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` (B, H, S, D) twice, for the attention and for φ.

    Compiled, gradients of the two are added in the order (B, S, H, D), that of a projection's
    memory: in the order of `x` Inductor writes the sum, and then a copy for the product to read.
    """
    if not torch.compiler.is_compiling():
        return x, x
    rows = x.transpose(1, 2)
    return rows.transpose(1, 2), rows.transpose(1, 2)


def add_shifted(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over j of `parts[..., i + j, j, :]`: what each of its l/d segments gives to block i.

    Args:
        parts: (..., segments, l/d, X); entry [..., s, j, :] is what segment s contributes where
            it is the j-th of a block.
        dtype: of the sum.

    Returns:
        (..., segments - l/d + 1, X)
    """
    num_shifts = parts.shape[-2]
    num_blocks = parts.shape[-3] - num_shifts + 1
    total = parts[..., :num_blocks, 0, :].to(dtype)
    for shift in range(1, num_shifts):
        total = total + parts[..., shift : shift + num_blocks, shift, :].to(dtype)
    return total


def _sum_of_tokens(segments: Tensor) -> Tensor:
    """Sum over the d tokens of each segment (..., segments, d, D), in `_accumulation_dtype`.

    Compiled, four at a time: Inductor unrolls sums of fewer than eight terms into a kernel that
    reads as fast as memory allows, where its sum of 16 takes several times as long.
    """
    dtype = _accumulation_dtype(segments.dtype)
    if torch.compiler.is_compiling():
        for terms in (4, 2):
            while segments.shape[-2] % terms == 0 and segments.shape[-2] > terms:
                segments = segments.unflatten(-2, (-1, terms)).sum(-2, dtype=dtype)
    return segments.sum(-2, dtype=dtype)


def mean_of_blocks(segments: Tensor, config: NSAConfig) -> Tensor:
    """Mean over the l tokens of each block, in float32 (float64 for float64).

    Args:
        segments: (..., segments, d, D) of `split_segments`.

    Returns:
        (..., N, D)
    """
    num_shifts = config.compress_block_size // config.compress_stride
    sums = _sum_of_tokens(segments)  # [..., segments, D]
    num_blocks = sums.shape[-2] - num_shifts + 1
    total = sums[..., :num_blocks, :]
    for shift in range(1, num_shifts):
        total = total + sums[..., shift : shift + num_blocks, :]
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
        TypeError: config is no NSAConfig, or a size no int.
        ValueError: `kind` is unknown, or a size is less than 1.

    >>> compress = Compression(NSAConfig(), num_kv_heads=2, head_dim=8)
    >>> compress(torch.randn(1, 2, 100, 8)).shape
    torch.Size([1, 2, 5, 8])
    """

    # Of `tensor_parallel`: `num_kv_heads` is this rank's, and parameters are DTensors.
    is_split: bool = False

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
        if not isinstance(config, NSAConfig):
            raise TypeError(f"config must be an NSAConfig, got {type(config).__name__}")
        kind = config.compression if kind is None else kind
        if kind not in get_args(CompressionKind):
            kinds = ", ".join(get_args(CompressionKind))
            raise ValueError(f"kind is {kind!r}; it must be one of {kinds}")
        for name, size in (("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
            if checked_int(name, size) < 1:
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
        return _blocks(self.kind, segments, self.config, self.own_parameters()).to(x.dtype)

    def own_parameters(self) -> dict[str, Tensor]:
        """Parameters by name; in tensor parallelism what this rank has of them."""
        found = {name: getattr(self, name) for name in self.parameter_names}
        return {name: of_rank(x) for name, x in found.items()} if self.is_split else found

    def of_heads(self, heads: slice) -> Compression:
        """φ of some of the KV heads, by the same parameters; not a module to keep."""
        some = copy.copy(self)
        some.num_kv_heads = heads.stop - heads.start
        if self.kind != "mlp":  # whose parameters all heads share
            some._parameters = {name: x[heads] for name, x in self.own_parameters().items()}  # type: ignore[misc]
        return some

    def _check(self, x: Tensor) -> None:
        shape = tuple(x.shape)
        if x.dim() != 4 or shape[1] != self.num_kv_heads or shape[3] != self.head_dim:
            raise ValueError(
                f"x has shape {shape}; expected (batch, num_kv_heads={self.num_kv_heads}, "
                f"tokens, head_dim={self.head_dim})"
            )
        if not x.is_floating_point():
            raise TypeError(f"x has dtype {x.dtype}; expected a floating point dtype")


def compress_both(
    compress_key: Compression, compress_value: Compression, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """`compress_key(key)` and `compress_value(value)`, in one pass where the two are alike.

    One pass launches half the kernels. It is for `mlp`; `mean` and `weighted` fuse with reading
    the input, which is then copied nowhere, and `linear` has two calls of few kernels.

    Args:
        compress_key, compress_value: φ.
        key: (B, Hkv, S, D), value: (B, Hkv, S, Dv).

    Returns:
        (B, Hkv, max(2, N), D) and (B, Hkv, max(2, N), Dv), in the dtypes of key and value.
    """
    if not _are_alike(compress_key, compress_value, key, value):
        return compress_key(key), compress_value(value)
    compress_key._check(key)
    parameters = {
        name: torch.stack((getattr(compress_key, name), getattr(compress_value, name)))
        for name in compress_key.parameter_names
    }
    segments = _split_both(key, value, compress_key.config)
    blocks = _blocks(compress_key.kind, segments, compress_key.config, parameters)
    compressed_key, compressed_value = blocks.to(key.dtype).unbind()
    return compressed_key, compressed_value


def compress_what_is_read(
    compress_key: Compression, compress_value: Compression, key: Tensor, value: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """`compress_both` for a whole row, None in the place of what no branch of the config reads."""
    config = compress_key.config
    if config.has("compressed"):
        return compress_both(compress_key, compress_value, key, value)
    return (compress_key(key) if config.has("selected") else None), None


def what_is_read(
    config: NSAConfig, compressed_key: Tensor, compressed_value: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Both, but None in the place of what no branch of the config reads."""
    return (
        compressed_key if config.compresses else None,
        compressed_value if config.has("compressed") else None,
    )


def _are_alike(
    compress_key: Compression, compress_value: Compression, key: Tensor, value: Tensor
) -> bool:
    return (
        is_plain_module(compress_key, Compression)
        and is_plain_module(compress_value, Compression)
        and compress_key.kind == compress_value.kind == "mlp"
        and compress_key.head_dim == compress_value.head_dim
        and compress_key.num_kv_heads == compress_value.num_kv_heads
        and compress_key.config is compress_value.config
        and (key.shape, key.dtype, key.device) == (value.shape, value.dtype, value.device)
        and all(
            (x.dtype, x.device) == (y.dtype, y.device)
            for x, y in zip(compress_key.parameters(), compress_value.parameters(), strict=True)
        )
    )


def _blocks(
    kind: CompressionKind, segments: Tensor, config: NSAConfig, parameters: dict[str, Tensor]
) -> Tensor:
    """Every whole block of `segments` (*sets, B, Hkv, segments, d, D), (*sets, B, Hkv, N, D).

    Args:
        kind: of φ.
        segments: of `split_segments`; for mlp several sets may lie side by side in a first
            dimension.
        config: l and d.
        parameters: of φ by name, with the same first dimension, one φ for each set.

    Returns:
        in the accumulation dtype or the dtype of `segments`.
    """
    if kind == "weighted":
        return _weighted(segments, config, **parameters)
    if kind == "linear":
        return _linear(segments, config, **parameters)
    if kind == "mlp":
        return _mlp(segments, config, **parameters)
    return mean_of_blocks(segments, config)


def _weighted(segments: Tensor, config: NSAConfig, logits: Tensor) -> Tensor:
    dtype = _accumulation_dtype(segments.dtype)
    weights = logits.to(dtype).softmax(-1)
    weights = weights.unflatten(1, (-1, config.compress_stride))  # [Hkv, l/d, d]
    wide = segments.to(dtype)
    # A product and a sum, not a matrix product: for l/d output rows it is bound by memory,
    # and Inductor turns it into one pass over the strided input without a copy.
    parts = [(wide * weights[:, None, shift, :, None]).sum(3) for shift in range(weights.shape[1])]
    return add_shifted(torch.stack(parts, 3), dtype)


def _linear(segments: Tensor, config: NSAConfig, weight: Tensor) -> Tensor:
    weight = weight.to(segments.dtype).unflatten(1, (-1, config.compress_stride))
    weight = weight.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)  # [Hkv, d·D, (l/d)·D]
    parts = torch.einsum("bhsk,hkn->bhsn", segments.flatten(3), weight)
    parts = parts.unflatten(3, (-1, segments.shape[4]))
    return add_shifted(parts, _accumulation_dtype(segments.dtype))


def _mlp(
    segments: Tensor,
    config: NSAConfig,
    position: Tensor,
    hidden_weight: Tensor,
    output_weight: Tensor,
) -> Tensor:
    dtype = _accumulation_dtype(segments.dtype)
    shift = position.to(dtype).mean(-2)  # [*sets, D]
    mean = mean_of_blocks(segments, config) + shift[..., None, None, None, :]
    hidden_1, change = _hidden(segments, config, position, hidden_weight).chunk(2, dim=-1)
    # One memory layout for both halves: a CPU's vector and scalar gelu differ in the last
    # bit, so equal numbers must meet the same one.
    hidden_1 = hidden_1.contiguous()
    hidden_2 = hidden_1 - change
    output_1, output_2 = output_weight.unbind(-3)
    # gelu(h1) C1 - gelu(h2) C2, written in differences: while the halves are equal each term
    # is a product with exact zeros, in any dtype and for any order of summation.
    active_2 = F.gelu(hidden_2)
    factors = _joined((F.gelu(hidden_1) - active_2, active_2), -1, segments.dtype)
    matrix = _joined((output_1, output_1 - output_2), -2, segments.dtype)
    return mean + _times(factors, matrix).to(dtype)


def _hidden(
    segments: Tensor, config: NSAConfig, position: Tensor, hidden_weight: Tensor
) -> Tensor:
    """z A₁ and z (A₁ - A₂) side by side, (*sets, B, Hkv, N, 2·D), in the accumulation dtype."""
    block, stride = config.compress_block_size, config.compress_stride
    num_shifts = block // stride
    dtype = _accumulation_dtype(segments.dtype)
    # Each token of a segment by its turn, so that joining is the copy that the layout needs.
    first, second = (
        x.unflatten(-3, (num_shifts, stride)).movedim(-4, -2) for x in hidden_weight.unbind(-4)
    )
    pair = _joined((first, first - second), -1, segments.dtype)  # [*sets, d, D, l/d, 2·D]
    weight = pair.flatten(-2).flatten(-3, -2)  # [*sets, d·D, (l/d)·2·D]
    tokens = segments.flatten(-2).flatten(-4, -2)  # [*sets, B·H·segments, d·D]
    # The position embedding enters as position A, not as l/d copies of the input: as segments of
    # its own, of which the j-th counts where it is the j-th of a block.
    own = position.to(segments.dtype).unflatten(-2, (num_shifts, stride)).flatten(-2)
    if torch.compiler.is_compiling():  # the copy of the tokens is a launch anyway: one product
        product = torch.cat((tokens, own), -2) @ weight
        of_tokens = product[..., : tokens.shape[-2], :]
        of_position = product[..., tokens.shape[-2] :, :]
    else:
        of_tokens, of_position = tokens @ weight, own @ weight
    parts, of_position = (x.unflatten(-1, (num_shifts, -1)) for x in (of_tokens, of_position))
    row = add_shifted(of_position, dtype)  # [*sets, 1, 2·D]
    hidden = add_shifted(parts.unflatten(-3, segments.shape[-5:-2]), dtype)
    return hidden + row[..., None, None, :, :]


def _joined(tensors: tuple[Tensor, Tensor], dim: int, dtype: torch.dtype) -> Tensor:
    """Two tensors side by side in `dtype`. Cast first: behind a cat it is a kernel of its own."""
    return torch.cat([x.to(dtype) for x in tensors], dim)


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """(*sets, B, H, N, K) by (*sets, K, M), one matrix product a set."""
    return (x.flatten(-4, -2) @ matrix).unflatten(-2, x.shape[-4:-1])
