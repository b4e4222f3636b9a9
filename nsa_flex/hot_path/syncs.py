"""Catch host syncs and data-dependent operators while code runs, on any device.

A dispatch mode sees every operator that reaches a kernel, also in backward and inside compiled
code that runs operator by operator. Some Python calls read a tensor without an operator on CPU
(`.tolist()`, `.numpy()`, `.cpu()`, printing): those methods of Tensor are wrapped meanwhile. (Not
a function mode: torch.compile traces through one and compiles anew under it. Dynamo knows tensor
methods by name and never sees these wrappers.) On CUDA, torch's own sync debug mode adds what
happens below the operators.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

from nsa_flex.hot_path.findings import Finding, FindingKind, Recording
from nsa_flex.hot_path.torch_internals import backward_node_name, custom_op_kernel, replaced

HOST_READS = {
    "item": "Tensor.item()",
    "tolist": "Tensor.tolist()",
    "numpy": "Tensor.numpy()",
    "cpu": "Tensor.cpu()",
    "__array__": "numpy.asarray(tensor)",
    "__bool__": "bool(tensor)",
    "__int__": "int(tensor)",
    "__float__": "float(tensor)",
    "__complex__": "complex(tensor)",
    "__index__": "tensor as a Python index",
    "__contains__": "value in tensor",
    "__repr__": "printing a tensor",
    "__format__": "formatting a tensor",
}
MASK_DTYPES = (torch.bool, torch.uint8)


@contextlib.contextmanager
def watch_host_reads(recording: Recording, *, compiled: bool = False) -> Iterator[None]:
    """Within this context, record calls of the methods in `HOST_READS`, from any thread.

    Args:
        recording: takes the findings.
        compiled: the code inside runs compiled. Its guards compare `one_hot` of
            `torch.nn.functional` with what was compiled, so that one stays; graphs call torch's
            own.
    """
    one_hot = torch._C._nn if compiled else torch.nn.functional
    with contextlib.ExitStack() as stack:
        for name, detail in HOST_READS.items():
            original = getattr(torch.Tensor, name)
            stack.enter_context(
                replaced(torch.Tensor, name, _watched(original, detail, recording))
            )
        for owner, name, wrap in (
            (torch.Tensor, "__setitem__", _watched_setitem),
            (one_hot, "one_hot", _silenced_one_hot),
        ):
            stack.enter_context(replaced(owner, name, wrap(getattr(owner, name), recording)))
        yield


def has_mask(index: Any) -> bool:
    """Whether an index, or the tensors of one, holds a boolean mask."""
    entries = index if isinstance(index, (tuple, list)) else (index,)
    return any(isinstance(e, torch.Tensor) and e.dtype in MASK_DTYPES for e in entries)


def _watched(original: Callable, detail: str, recording: Recording) -> Callable:
    # Behind a graph break torch compiles what Python code calls, this too. Where that happens in
    # printing, torch 2.11 keeps frames of printing alive, one of which holds functorch disabled:
    # vmap then fails.
    @torch.compiler.disable(reason="a read of a value that is watched")
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        recording.record("host-sync", detail)
        with recording.silenced():
            return original(*args, **kwargs)

    return method


def _watched_setitem(original: Callable, recording: Recording) -> Callable:
    # The operator sees a Python scalar and a 0-d CPU tensor alike; only the first is a fill.
    write = _watched(original, "writing a tensor through a mask", recording)

    @functools.wraps(original)
    def setitem(self: torch.Tensor, index: Any, value: Any) -> None:
        is_write = isinstance(value, torch.Tensor) and has_mask(index)
        return (write if is_write else original)(self, index, value)

    return setitem


def _silenced_one_hot(original: Callable, recording: Recording) -> Callable:
    # With a stated number of classes it reads its input, to check the range, on the CPU alone.
    @functools.wraps(original)
    def one_hot(*args: Any, **kwargs: Any) -> torch.Tensor:
        num_classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        with recording.silenced() if num_classes >= 0 else contextlib.nullcontext():
            return original(*args, **kwargs)

    return one_hot


aten = torch.ops.aten

_CUDA_SYNC_TEXT = "called a synchronizing CUDA operation"


class SyncDetector(Recording):
    """Context manager that records host syncs and data-dependent operators of the code inside.

    It changes no result. Found, forward and backward: reads of a value by Python (`.item()`,
    `int()`, `bool()`, `.tolist()`, `.numpy()`, printing, …), operators whose output shape depends
    on values (`nonzero`, boolean indexing, `masked_select`, `unique`, `repeat_interleave` without
    `output_size`, …: all that carry torch's tags for it), `.cpu()`, and blocking copies between
    host and device; also inside custom operators. `x[mask] = 0.0` is a fill without a sync, and
    is no finding. Code below the operators (C++, kernels) is left to CUDA's own debug mode.

    Gradient formulas are watched too, on autograd's device threads as well: they take the
    caller's modes over. There a location is known where the formula is Python code. While a
    detector is active, what other threads read is recorded with the rest.

    Args:
        compiled: all the code inside is compiled already, and has to stay as it is.

    >>> with SyncDetector() as detector:
    ...     _ = torch.ones(3).sum().item()
    >>> detector.findings[0].detail
    'Tensor.item()'
    """

    def __init__(self, *, compiled: bool = False) -> None:
        super().__init__()
        self._compiled = compiled
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(watch_host_reads(self, compiled=self._compiled))
        self._stack.enter_context(_DispatchMode(self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()


def find_syncs(fn: Callable, *args: Any, **kwargs: Any) -> list[Finding]:
    """Run `fn(*args, **kwargs)` and list its host syncs and data-dependent operators.

    The first call is not watched, so that compilation and autotuning are over. The second runs
    under `SyncDetector`. Where CUDA is in use, a third runs under torch's own sync debug mode
    alone, since some gradient formulas of torch (`cumprod`) read no value while a mode is active.
    Wrap `fn` in `ForwardBackward` to include its backward. Exceptions of `fn` are raised.

    >>> find_syncs(lambda x: x[x > 0], torch.ones(3))[0].detail
    'aten.index.Tensor with a mask'
    """
    return find_syncs_of(lambda: functools.partial(fn, *args, **kwargs))


def find_syncs_of(prepare: Callable[[], Callable[[], Any]]) -> list[Finding]:
    """As `find_syncs`, of the calls that `prepare` returns; `prepare` itself is not watched.

    For calls that use their inputs up, such as caches: it makes new ones for each call.

    >>> find_syncs_of(lambda: functools.partial(torch.sin, torch.ones(torch.ones(1).numel())))
    []
    """
    prepare()()
    call = prepare()
    with SyncDetector() as detector:
        call()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        call = prepare()
        with cuda_sync_warnings(detector):
            call()
    return _without_echoes(detector.findings)


def _without_echoes(findings: list[Finding]) -> list[Finding]:
    """Drop CUDA's word on a line for which the modes already gave the operator's name."""
    named = {finding.location for finding in findings if finding.kind != "cuda-sync"}
    return [f for f in findings if f.kind != "cuda-sync" or f.location not in named]


class _DispatchMode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, detector: SyncDetector) -> None:
        super().__init__()
        self.detector = detector

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Compiled code (FlexAttention's eager form too) stays compiled under this mode.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        offence = _offence(func, args, kwargs)
        if offence is not None:
            kind, detail = offence
            self.detector.record(kind, detail + _gradient_formula())
        kernel = custom_op_kernel(func, args, kwargs)
        if kernel is None:
            return func(*args, **kwargs)
        # Look inside: a mode is off while it handles a call, so enter it again.
        with self:
            return kernel(*args, **kwargs)


def _gradient_formula() -> str:
    name = backward_node_name()
    return "" if name is None else f" in {name}"


def _offence(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[FindingKind, str] | None:
    """The rule that an operator call breaks, as kind and detail."""
    if func in (aten._to_copy.default, aten.copy_.default):
        return _copy_offence(func, args, kwargs)
    if func is aten._local_scalar_dense.default:
        return "host-sync", f"{func} (a tensor's value read by Python)"
    if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        is_fill = func is not aten.index.Tensor and _is_scalar_on_host(args[2])
        return (
            ("data-dependent", f"{func} with a mask")
            if has_mask(args[1]) and not is_fill
            else None
        )
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return None
    tags = getattr(func, "tags", ())
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return "data-dependent", str(func)
    return None


def _copy_offence(
    func: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[FindingKind, str] | None:
    if func is aten._to_copy.default:
        source, target = args[0].device, kwargs.get("device") or args[0].device
        non_blocking = kwargs.get("non_blocking", False)
    else:
        target, source = args[0].device, args[1].device
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    types = (source.type, target.type)
    if source.type == target.type or "cpu" not in types or "meta" in types:
        return None
    if target.type != "cpu" and non_blocking:
        return None
    return "device-copy", f"{func} from {source} to {target}"


def _is_scalar_on_host(value: torch.Tensor) -> bool:
    return value.numel() == 1 and value.device.type == "cpu"


@contextlib.contextmanager
def cuda_sync_warnings(detector: SyncDetector) -> Iterator[None]:
    """Turn torch's warnings about CUDA synchronisations into findings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_CUDA_SYNC_TEXT}")
        show = warnings.showwarning

        def record(message: Any, *rest: Any, **named: Any) -> None:
            if _CUDA_SYNC_TEXT in str(message):
                detector.record("cuda-sync", _CUDA_SYNC_TEXT)
            else:
                show(message, *rest, **named)

        warnings.showwarning = record
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
