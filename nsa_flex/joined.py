"""Keys, values and gates of a layer from one product, where a compiled layer trains.

Four linear maps read the input of an attention layer: queries, keys, values and gates. Each by
itself is a product that reads the whole input forward and again for its weight's gradient, and
gives a gradient as large as the input, and a sum of four of these is a pass of its own. Keys,
values and gates have few columns and take little longer together than one of them. Queries stay
apart: the columns beside the values live until the backward has read these.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa_flex.gates import ALIGNED_COLUMNS, GateLinear, Gates
from nsa_flex.plain_modules import is_plain_module


class JoinedInput:
    """Stands for the input x of an attention layer in calls of `nn.Linear` alone.

    Of the joined maps such a call gives the columns that are there already, of any other the map
    of x.

    Args:
        x: (B, S, E).
        maps: weight (N, E) of each and its bias (N,), or None for none.
        parts: what they give, (B, S, N) each.
        gate_logits: (B, S, 3 · Hq), without the bias.
    """

    def __init__(
        self,
        x: Tensor,
        maps: Sequence[tuple[Tensor, Tensor | None]],
        parts: Sequence[Tensor],
        gate_logits: Tensor,
    ) -> None:
        self.x, self.maps, self.parts = x, maps, parts
        self.gate_logits = gate_logits

    @property
    def shape(self) -> torch.Size:
        """Of x."""
        return self.x.shape

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not F.linear or not isinstance(args[0], cls):
            raise TypeError(f"the input of an attention layer was joined, and {func} is no map")
        joined, weight, *others = args
        bias = others[0] if others else (kwargs or {}).get("bias")
        for (own_weight, own_bias), part in zip(joined.maps, joined.parts, strict=True):
            if own_weight is weight and own_bias is bias:  # a weight may be tied, its bias another
                return part
        return F.linear(joined.x, weight, bias)


def joined_input(x: Tensor, maps: Sequence[nn.Linear], gates: Gates) -> JoinedInput | None:
    """x and what `maps` and `gates` make of it by one product; None if they are to be called.

    They are called where nothing is compiled or no gradient is kept (then the weights would be
    put together at each call for little), where hooks, wrappers or classes of their own make of
    them more than a product, and where some weights do not train, or differ in dtype or device.

    Args:
        x: (B, S, E).
        maps: linear maps of E features.
        gates: the layer's gates.
    """
    if not torch.compiler.is_compiling() or not torch.is_grad_enabled() or type(x) is not Tensor:
        return None
    kinds = [(each, nn.Linear) for each in maps] + [(gates.linear, GateLinear)]
    if not is_plain_module(gates, Gates):
        return None
    if not all(is_plain_module(each, kind, may_lack=("bias",)) for each, kind in kinds):
        return None
    weights, last = [each.weight for each in maps], gates.linear.weight
    biases: list[Tensor] = [each.bias for each in maps if each.bias is not None]
    if biases and len(biases) < len(maps):
        return None
    if not all(
        each.requires_grad and each.dtype == last.dtype and each.device == last.device
        for each in (*weights, *biases, last)
    ):
        return None
    sizes = [each.shape[0] for each in (*weights, last)]
    sizes.append(-sum(sizes) % ALIGNED_COLUMNS)
    whole = F.pad(torch.cat((*weights, last)), (0, 0, 0, sizes[-1]))
    bias = F.pad(torch.cat(biases), (0, sum(sizes[-2:]))) if biases else None
    *parts, gate_logits, _ = F.linear(x, whole, bias).split(sizes, dim=-1)
    return JoinedInput(x, [(each.weight, each.bias) for each in maps], parts, gate_logits)


def reads_linearly(module: nn.Module, argument: str, maps: Sequence[str]) -> bool:
    """Whether `module.forward` uses an argument for its leading sizes and for these maps alone.

    By its source: `argument.shape[:-1]`, and `self.map(argument)` for the maps by name. False
    where there is no source, or the argument is assigned to.
    """
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, TypeError, SyntaxError):
        return False
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == argument]
    allowed: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node) == f"{argument}.shape[:-1]":
            assert isinstance(node.value, ast.Attribute)
            allowed.add(node.value.value)
        elif _is_call_of(node, maps):
            assert isinstance(node, ast.Call)
            allowed.add(node.args[0])
    return bool(names) and set(names) <= allowed


def _is_call_of(node: ast.AST, maps: Sequence[str]) -> bool:
    """Whether it is `self.map(x)`, with nothing but the one argument."""
    return (
        isinstance(node, ast.Call)
        and len(node.args) == 1
        and not node.keywords
        and ast.unparse(node.func) in {f"self.{name}" for name in maps}
    )
