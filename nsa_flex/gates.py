"""Gates: how much of each branch a query head takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa_flex.config import BRANCHES, BranchName
from nsa_flex.plain_modules import has_hooks, is_plain_module

if TYPE_CHECKING:
    from jaxtyping import Float

GateInit = Literal["paper", "dense", "unbiased"]

ALIGNED_COLUMNS = 8  # of half precision, in 16 bytes


class GateLogits(NamedTuple):
    """Gates before the sigmoid: what a kernel that applies it takes.

    logits: (B, Hq, S, C) of C branches in the dtype of the gates. offset: (C,). bias: (C · Hq,), C
    a head, where the logits lack it.
    """

    logits: Tensor
    offset: Tensor
    bias: Tensor | None = None

    def gates(self) -> Tensor:
        """sigmoid(logits + bias) + offset, computed in float32 or better, (B, Hq, S, C)."""
        wide = torch.promote_types(self.logits.dtype, torch.float32)
        logits = self.logits.to(wide)
        if self.bias is not None:
            logits = logits + self.bias.to(wide).view(-1, 1, logits.shape[-1])
        return (logits.sigmoid() + self.offset.to(wide)).to(self.logits.dtype)


def _on_kernels(x: Tensor) -> bool:
    """Whether kernels of ours run an eager decode step of such tokens."""
    return x.is_cuda


class GateLinear(nn.Linear):
    """A linear map that starts at zero, also when a framework resets every module by itself."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weight and bias to zero."""
        for parameter in self.parameters():
            parameter.zero_()


class Gates(nn.Module):
    """g = sigmoid(x W + b) + offset, one gate per query head and branch (eq. 5 of the paper).

    W and b start at zero. `init="paper"` has offset 0 and starts at the neutral (½, ½, ½).
    `init="dense"` has the fixed offset (-½, ½, -½) and starts at exactly (0, 1, 0), the selected
    branch alone, which is dense attention while S <= n·l'. The sigmoid is then at its steepest
    (slope ¼), where a gate brought to 0 or 1 by a large bias would hardly learn. The offset is a
    buffer, saved with the weights, so a reloaded module means the same gates.

    Sigmoid and offset are computed in float32 (float64 for float64): in bfloat16 a sigmoid near
    ½ moves in steps of 0.002, and a gate that starts at 0 would stay there until its logit
    passed 0.004.

    `init="unbiased"` is "paper" without b, and has rows of W for absent branches, too, which
    nothing reads: the weight of public checkpoints (NSA-1B for example).

    Args:
        hidden_size: E, width of the layer's input.
        num_query_heads: Hq.
        init: "paper", "dense" or "unbiased".
        branches: C branches, each of which has a gate a head, in this order.

    Raises:
        ValueError: `init` is unknown, "dense" without a selected branch, or a size is less than 1.

    >>> Gates(64, 8, init="dense")(torch.randn(1, 5, 64))[0, 0, 0].tolist()
    [0.0, 1.0, 0.0]
    """

    offset: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_query_heads: int,
        *,
        init: GateInit = "paper",
        branches: tuple[BranchName, ...] = BRANCHES,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if init not in get_args(GateInit):
            names = ", ".join(get_args(GateInit))
            raise ValueError(f"init is {init!r}; it must be one of {names}")
        for name, size in (("hidden_size", hidden_size), ("num_query_heads", num_query_heads)):
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        known = set(branches) <= set(BRANCHES)  # letters of a string are none
        if not known or not branches or len(set(branches)) < len(branches):
            raise ValueError(
                f"branches is {branches!r}; it must name some of {', '.join(BRANCHES)}, each once"
            )
        self.hidden_size = hidden_size
        self.num_query_heads = num_query_heads
        if init == "dense" and "selected" not in branches:
            raise ValueError(
                'init="dense" starts with the selected branch alone, and there are only '
                f'{", ".join(branches)}: use init="paper"'
            )
        self.init: GateInit = init
        self.branches = branches
        self.rows = BRANCHES if init == "unbiased" else branches  # of W, a head
        self.linear = GateLinear(
            hidden_size,
            num_query_heads * len(self.rows),
            bias=init != "unbiased",
            device=device,
            dtype=dtype,
        )
        self.register_buffer("offset", torch.empty(len(branches), device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Linear map to zero, offset to that of `init`."""
        self.linear.reset_parameters()
        for i, branch in enumerate(self.branches):
            dense = 0.5 if branch == "selected" else -0.5
            self.offset[i].fill_(dense if self.init == "dense" else 0.0)

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return f"num_query_heads={self.num_query_heads}, init={self.init!r}"

    def forward(
        self, x: Float[Tensor, "B S E"], *, as_logits: bool = False
    ) -> Float[Tensor, "B Hq S C"] | GateLogits:
        """Gates of every token.

        Args:
            x: (B, S, E), the input of the attention layer.
            as_logits: give what they are computed from, for a decode step. An eager one on CUDA
                adds the bias in its kernels: the host takes two thirds of the time for a linear
                map without one.

        Returns:
            (B, Hq, S, C) in the dtype of `x`, in the order of the branches; a transposed view of
            (B, S, Hq, C) memory.

        Raises:
            ValueError: `x` is not (B, S, E) with this module's E.
        """
        if x.dim() != 3 or x.shape[2] != self.hidden_size:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; "
                f"expected (batch, tokens, hidden_size={self.hidden_size})"
            )
        if as_logits and _on_kernels(x):
            # From where nn.Module looks last, and slowly.
            linear, offset = self._modules.get("linear"), self._buffers.get("offset")
            if linear is not None and offset is not None and self._is_apart(linear):
                return self._logits_apart(x, linear._parameters, offset)
        logits = self.linear(x) if as_logits else self._many_logits(x)
        found = self._per_head(logits, x.dtype)
        return found if as_logits else found.gates()

    def _per_head(self, logits: Tensor, dtype: torch.dtype) -> GateLogits:
        """(B, S, rows·Hq) -> (B, Hq, S, C)."""
        if logits.dtype != dtype:
            logits = logits.to(dtype)
        logits = logits.view(*logits.shape[:2], self.num_query_heads, len(self.rows))
        if self.rows != self.branches:
            taken = [logits[..., self.rows.index(name)] for name in self.branches]
            logits = torch.stack(taken, -1)
        return GateLogits(logits.transpose(1, 2), self.offset)

    def _is_apart(self, linear: nn.Module) -> bool:
        """Whether the bias of such a linear map may be added later: eager, without gradients."""
        return (
            not torch.compiler.is_compiling()
            and not torch.is_grad_enabled()
            and self.rows == self.branches
            and is_plain_module(linear, GateLinear, may_lack=("bias",))
            and (linear._parameters["bias"] is None or linear._parameters["bias"].is_contiguous())
        )

    def _logits_apart(self, x: Tensor, parameters: dict[str, Any], offset: Tensor) -> GateLogits:
        """Logits without the bias, and the bias."""
        logits = F.linear(x, parameters["weight"]).contiguous()  # [B, S, C·Hq]
        if logits.dtype != x.dtype:
            logits = logits.to(x.dtype)
        batch, tokens, columns = logits.shape
        # One view for the two of `forward`.
        shape = (batch, self.num_query_heads, tokens, len(self.rows))
        strides = (tokens * columns, len(self.rows), columns, 1)
        return GateLogits(logits.as_strided(shape, strides), offset, parameters["bias"])

    def _many_logits(self, x: Tensor) -> Tensor:
        """x W + b of many tokens, (B, S, rows·Hq).

        Compiled, columns of zeros fill W up to a multiple of 8, and are cut off again: cuBLAS has
        slow kernels alone for rows that are not aligned to 16 bytes, forward and backward. The
        filling fuses with the cast of the weight, and the cut with the sigmoid. So does the bias,
        in its own dtype: inside of the product it is cast before and its gradient behind, by a
        kernel each.
        """
        is_plain = is_plain_module(self.linear, GateLinear, may_lack=("bias",))
        if not torch.compiler.is_compiling() or not is_plain:
            return self.linear(x)
        columns, weight = len(self.rows) * self.num_query_heads, self.linear.weight
        if columns % ALIGNED_COLUMNS:
            weight = F.pad(weight, (0, 0, 0, -columns % ALIGNED_COLUMNS))
        logits = F.linear(x, weight)[..., :columns]
        return logits if self.linear.bias is None else logits + self.linear.bias


def gates_of_step(gates: Any, x: Tensor) -> Tensor | GateLogits:
    """What `Gates` gives for a decode step: as logits, unless hooks are to see its gates."""
    as_logits = type(gates) is Gates and not has_hooks(gates)
    return gates(x, as_logits=True) if as_logits else gates(x)
