"""Whole sequences with some heads on each rank, in attention alone (Ulysses sequence parallelism).

Outside of attention each of P ranks has 1 / P of the tokens of every row, one run after another.
An all-to-all around attention gives it all tokens of 1 / P of the heads, and a second one takes
them back. Others make these of queries, keys, values and outputs (DeepSpeed); NSA's gates, which
are as many as the query heads, follow here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


@dataclass(frozen=True)
class HeadShards:
    """The ranks that share heads.

    Args:
        mesh: of one dimension.
        in_eval: whether a model in eval mode shares them, too.
    """

    mesh: DeviceMesh
    in_eval: bool = False

    def hold(self, *, training: bool) -> bool:
        """Whether heads are shared in a call of a model in this mode."""
        return training or self.in_eval

    @property
    def size(self) -> int:
        """P."""
        return self.mesh.size()

    def gather_tokens(self, x: Float[Tensor, "B H T C"]) -> Float[Tensor, "B H/P S C"]:
        """All tokens of this rank's heads, of all heads of its tokens; gradients go back."""
        from torch.distributed.tensor import DTensor, Shard

        tokens = DTensor.from_local(x.contiguous(), self.mesh, [Shard(2)], run_check=False)
        return tokens.redistribute(placements=[Shard(1)]).to_local()

    def gather_rows(self, x: Shaped[Tensor, "B T"]) -> Shaped[Tensor, "B S"]:
        """All tokens of each row, of this rank's."""
        from torch.distributed.tensor import DTensor, Shard

        rows = DTensor.from_local(x.contiguous(), self.mesh, [Shard(1)], run_check=False)
        return rows.full_tensor()

    def own_tokens(self, x: Shaped[Tensor, "B S"]) -> Shaped[Tensor, "B T"]:
        """This rank's tokens of each row."""
        return x.chunk(self.size, 1)[self.mesh.get_local_rank()]

    def own_heads(self, number: int) -> slice:
        """Which of that many heads this rank has."""
        own = number // self.size
        return slice(self.mesh.get_local_rank() * own, (self.mesh.get_local_rank() + 1) * own)
