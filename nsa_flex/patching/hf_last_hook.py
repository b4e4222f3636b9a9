"""Forward pre-hooks that read a call as the module itself will.

Hooks run in the order they were registered in, and what comes later (steering, a mask put in its
place) may change the call. So hooks of others, whenever they come, go before these.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


@dataclass
class LastHook:
    """Handle of a hook that `register_last` registered."""

    module: nn.Module
    handle: RemovableHandle

    def remove(self) -> None:
        """Undo it; the module registers hooks as others do again."""
        self.handle.remove()
        vars(self.module).pop("register_forward_pre_hook", None)


def register_last(module: nn.Module, hook: Any) -> LastHook:
    """Register a forward pre-hook with keyword arguments of this package, to run last.

    Those of this package that follow run after it.
    """
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    # An instance attribute: the class and other modules of this type keep theirs.
    vars(module)["register_forward_pre_hook"] = functools.partial(_register_before_own, module)
    return LastHook(module, handle)


def remove_copies(module: nn.Module) -> None:
    """Undo the hooks of this package that a module has as a copy of another, by no handle."""
    hooks: Any = module._forward_pre_hooks
    for number in [number for number, hook in hooks.items() if _is_own(hook)]:
        del hooks[number], module._forward_pre_hooks_with_kwargs[number]
        vars(module).pop("register_forward_pre_hook", None)


def _register_before_own(module: nn.Module, *args: Any, **kwargs: Any) -> RemovableHandle:
    """`register_forward_pre_hook` of the module's class, but before hooks of this package."""
    handle = type(module).register_forward_pre_hook(module, *args, **kwargs)
    hooks: Any = module._forward_pre_hooks  # an OrderedDict
    for number in [number for number, hook in hooks.items() if _is_own(hook)]:
        hooks.move_to_end(number)
    return handle


def _is_own(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith(f"{__package__}.")
