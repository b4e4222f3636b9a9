"""How `patch` reaches into attention modules that are not transformers'.

An adapter tells the sizes of an attention module and runs it with NSA in the place of its
attention. Everything before (projections, position embedding, cache) and after (output
projection) stays the module's own:

    class GPTAdapter:
        def shape(self, module):
            return AttentionShape(
                hidden_size=module.width,
                num_query_heads=module.heads,
                num_kv_heads=module.heads,
                head_dim=module.width // module.heads,
            )

        def forward(self, module, attend, x):
            query, key, value = module.project(x)  # (B, H, S, D) each
            output = attend(x, query, key, value)  # (B, H, S, Dv)
            return module.out(output.transpose(1, 2).flatten(2))

    nsa_flex.register_adapter(CausalSelfAttention, GPTAdapter())
    nsa_flex.patch(model)
"""

from __future__ import annotations

import functools
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import nn

from nsa_flex.patching.layer import AttentionShape, NSALayer

ModuleT = TypeVar("ModuleT", bound=nn.Module, contravariant=True)


@runtime_checkable
class Adapter(Protocol[ModuleT]):
    """What `patch` must know of one type of causal self-attention module."""

    def shape(self, module: ModuleT) -> AttentionShape:
        """Sizes of `module`; raise ValueError, naming the feature, if NSA cannot stand in."""
        ...

    def forward(self, module: ModuleT, attend: NSALayer, *args: Any, **kwargs: Any) -> Any:
        """`module.forward(*args, **kwargs)` with `attend` in the place of its attention.

        `attend(hidden_states, query, key, value, scale=None, rows=None)` is described at
        `NSALayer.forward`. Masks among the arguments are the adapter's to honour (`padded_rows`
        and `packed_rows` make `rows`) or to refuse.
        """
        ...


_ADAPTERS: dict[type[nn.Module], Adapter[Any]] = {}


def register_adapter(module_type: type[nn.Module], adapter: Adapter[Any]) -> None:
    """Let `patch` change every module of `module_type` (or a subclass) through `adapter`.

    A later registration for the same type takes the place of the earlier one.

    Raises:
        TypeError: `module_type` is not an nn.Module class, or `adapter` lacks a method.
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise TypeError(f"module_type is {module_type!r}; it must be a subclass of nn.Module")
    if isinstance(adapter, type) or not isinstance(adapter, Adapter):
        raise TypeError(
            f"adapter is {adapter!r}; it must be an instance with methods shape(module) and "
            "forward(module, attend, *args, **kwargs)"
        )
    _ADAPTERS[module_type] = adapter


def find_adapter(module: nn.Module) -> Adapter[Any] | None:
    """The adapter of the module's type or of its nearest registered base class."""
    for base in type(module).__mro__:
        if base in _ADAPTERS:
            return _ADAPTERS[base]
    return None


def install(module: nn.Module) -> None:
    """Run `module` through its adapter from now on."""
    # An instance attribute: the class and the other modules of this type keep their forward.
    module.forward = functools.partial(_adapted_forward, module)  # a method is not unpickled


def remove(module: nn.Module) -> None:
    """Undo `install`."""
    del module.forward


def has_own_forward(module: nn.Module) -> bool:
    """Whether something else already replaced `forward` on this instance."""
    return "forward" in vars(module)


def is_installed(module: nn.Module) -> bool:
    """Whether `install` changed this module."""
    return getattr(vars(module).get("forward"), "func", None) is _adapted_forward


def _adapted_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    adapter = find_adapter(module)
    if adapter is None:
        raise RuntimeError(
            f"{type(module).__name__} was patched through an adapter that is not registered in "
            "this process; call nsa_flex.register_adapter for it first"
        )
    return adapter.forward(module, module.nsa, *args, **kwargs)
