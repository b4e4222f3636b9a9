"""Planted offenders prove that the detectors fire; clean code proves that they keep quiet."""

from __future__ import annotations

import functools
import inspect
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from nsa_flex.hot_path import (
    Finding,
    ForwardBackward,
    Report,
    SyncDetector,
    assert_clean,
    check,
    count_graphs,
    find_graph_breaks,
    find_syncs,
    find_value_reads,
    to_meta,
)
from nsa_flex.hot_path.findings import Recording
from nsa_flex.hot_path.meta import watch_host_copies
from nsa_flex.hot_path.syncs import _copy_offence

HERE = Path(__file__).name


def write_through_mask(x):
    y = x.clone()
    y[y[:, 0] > 0] = x + 1
    return y


def write_0d_tensor_through_mask(x):
    y = x.clone()
    y[y > 0] = y.sum()
    return y


def slice_to_longest(x):
    lengths = x[0].abs().long()
    return x[:, : lengths.max().item()]


def branch_on_tensor(x):
    if x.sum() > 0:
        return x + 1
    return x - 1


# name: (function, text of the find_syncs finding)
OFFENDERS = {
    "item": (lambda x: x * x.max().item(), "Tensor.item()"),
    "tolist": (lambda x: x * x.tolist()[0][0], "Tensor.tolist()"),
    "tolist of a scalar": (lambda x: x * x.sum().tolist(), "Tensor.tolist()"),
    "int": (lambda x: x * int(x.sum()), "int(tensor)"),
    "float": (lambda x: x * float(x.sum()), "float(tensor)"),
    "bool": (lambda x: x * bool(x.sum()), "bool(tensor)"),
    "if tensor": (branch_on_tensor, "bool(tensor)"),
    "range": (lambda x: [x for _ in range(x.sum().long())], "tensor as a Python index"),
    "in": (lambda x: x * (3.0 in x), "value in tensor"),
    "numpy": (lambda x: x * x.numpy().sum(), "Tensor.numpy()"),
    "cpu": (lambda x: x.cpu() * 2, "Tensor.cpu()"),
    "nonzero": (lambda x: x.nonzero(), "aten.nonzero.default"),
    "where of one argument": (lambda x: torch.where(x > 0)[0], "aten.nonzero.default"),
    "boolean index read": (lambda x: x[x > 0], "aten.index.Tensor with a mask"),
    "boolean index write": (write_through_mask, "writing a tensor through a mask"),
    "masked_select": (lambda x: x.masked_select(x > 0), "aten.masked_select.default"),
    "unique": (lambda x: x.unique(), "aten._unique2.default"),
    "unique_consecutive": (lambda x: x.unique_consecutive(), "aten.unique_consecutive.default"),
    "equal": (lambda x: x * torch.equal(x, x), "aten.equal.default"),
    "bincount": (lambda x: x[0].abs().long().bincount(), "aten.bincount.default"),
    "repeat_interleave": (
        lambda x: x.repeat_interleave(x[:, 0].abs().long(), 0),
        "aten.repeat_interleave.Tensor",
    ),
    "index by a 0-d tensor": (lambda x: x[x.argmax() * 0], "aten._local_scalar_dense.default"),
    "max().item() of lengths": (slice_to_longest, "Tensor.item()"),
}
# Without data torch lets these pass, or they touch no tensor that has any.
SILENT_ON_META: set[str] = {"boolean index write"}


def example() -> torch.Tensor:
    return torch.linspace(1.0, 3.0, 12).view(3, 4)


@pytest.mark.parametrize("name", OFFENDERS)
def test_offender_in_forward(name):
    fn, detail = OFFENDERS[name]
    first, *_ = find_syncs(fn, example())
    assert first.detail.startswith(detail)
    source, line = inspect.getsourcelines(fn)
    file, _, rest = first.location.rpartition(":")
    assert Path(file).name == HERE
    assert line <= int(rest.split(" in ")[0]) < line + len(source)


@pytest.mark.parametrize("name", OFFENDERS)
def test_offender_without_data(name):
    findings = find_value_reads(OFFENDERS[name][0], example())
    if name in SILENT_ON_META:
        assert findings == []
    else:
        (finding,) = findings
        assert finding.kind == "meta-run"
        assert HERE in finding.location


def planted_in_backward(fn):
    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            fn(gradient)
            return gradient * 2

    return Planted.apply


@pytest.mark.parametrize("name", OFFENDERS)
def test_offender_in_custom_backward(name):
    fn, detail = OFFENDERS[name]

    planted = planted_in_backward(fn)
    x = example().requires_grad_()
    assert find_syncs(planted, x) == []
    for step in (ForwardBackward(planted), lambda x: planted(x).sum().backward()):
        first, *_ = find_syncs(step, x)
        assert first.detail.startswith(detail)
        assert HERE in first.location
        assert len(find_value_reads(step, x)) == (name not in SILENT_ON_META)


def test_printing_is_one_finding(capsys):
    findings = find_syncs(print, example())
    assert [f.detail for f in findings] == ["printing a tensor"]
    assert "tensor(" in capsys.readouterr().out
    (finding,) = find_syncs(lambda x: f"{x.sum():.2f}", example())
    assert finding.detail == "formatting a tensor"


@pytest.mark.filterwarnings("ignore:called a synchronizing")
def test_cuda_sync_warnings_become_findings(monkeypatch):
    """Torch's side is played here; the gpu tests below have the real one."""
    modes = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def synchronizing(x):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return x * x.max().item()

    first, second = find_syncs(synchronizing, example())
    assert modes == ["warn", 0]
    assert first.detail == "Tensor.item()"
    assert second.kind == "cuda-sync"
    assert second.location.endswith("in synchronizing")


# Reads of host memory: on CUDA torch itself refuses them.
HOST_MEMORY_ONLY = {"numpy"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(OFFENDERS.keys() - HOST_MEMORY_ONLY))
def test_offender_on_cuda(name):
    fn, detail = OFFENDERS[name]
    first, *_ = find_syncs(fn, example().cuda())
    assert first.detail.startswith(detail)
    assert HERE in first.location


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(OFFENDERS.keys() - HOST_MEMORY_ONLY))
def test_offender_in_custom_backward_on_cuda(name):
    """Autograd runs CUDA's gradient formulas in a thread of its own."""
    fn, detail = OFFENDERS[name]
    planted = planted_in_backward(fn)
    x = example().cuda().requires_grad_()
    first, *_ = find_syncs(ForwardBackward(planted), x)
    assert first.detail.startswith(detail)
    assert HERE in first.location


@pytest.mark.gpu
def test_copies_between_host_and_device():
    x = example().cuda()
    to_host = find_syncs(lambda x: x.to("cpu"), x)
    assert [f.kind for f in to_host] == ["device-copy"]
    to_device = find_syncs(lambda x: x + torch.ones(4).to(x.device), x)
    assert [f.kind for f in to_device] == ["device-copy"]
    assert find_syncs(lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device), x)


@pytest.mark.gpu
def test_gradient_formula_that_hides_from_modes_is_found_by_cuda():
    x = example().cuda().requires_grad_()
    findings = find_syncs(ForwardBackward(torch.cumprod), x, 0)
    assert "cuda-sync" in {finding.kind for finding in findings}


def test_0d_tensor_written_through_mask():
    (finding,) = find_syncs(write_0d_tensor_through_mask, example())
    assert finding.detail == "writing a tensor through a mask"


def test_gradient_formula_is_named():
    def masked_rows(x):
        return x[torch.tensor([True, False, True])]

    x = example().requires_grad_()
    details = [finding.detail for finding in find_syncs(ForwardBackward(masked_rows), x)]
    assert details == [
        "aten.index.Tensor with a mask",
        "aten.index_put.default with a mask in IndexBackward0",
    ]


@torch.library.custom_op(
    "nsa_flex_tests::positives", mutates_args=(), tags=(torch.Tag.dynamic_output_shape,)
)
def positives(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].clone()


@torch.library.custom_op("nsa_flex_tests::normalized", mutates_args=())
def normalized(x: torch.Tensor) -> torch.Tensor:
    x.tolist()
    return x / x.max().item()


@normalized.register_fake
def _(x):
    return torch.empty_like(x)


def test_custom_operator_with_a_data_dependent_shape():
    outside, inside = find_syncs(positives, example())
    assert "nsa_flex_tests.positives" in outside.detail
    assert inside.detail == "aten.index.Tensor with a mask"
    assert inside.location.endswith("in positives")


def test_offender_inside_a_custom_operator():
    expected = [("Tensor.tolist()", "normalized"), ("Tensor.item()", "normalized")]
    for fn in (normalized, torch.compile(normalized, backend="aot_eager")):
        findings = find_syncs(fn, example())
        assert [(f.detail, f.location.split(" in ")[1]) for f in findings] == expected
    with SyncDetector():
        watched = normalized(example())
    assert torch.equal(watched, example() / 3)


def test_offender_inside_compiled_code():
    @torch.compile(backend="aot_eager")
    def compiled(x):
        return x[x > 0].sum() * 2

    details = [finding.detail for finding in find_syncs(compiled, example())]
    assert any("aten" in detail for detail in details)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "found"),
    [
        ("_to_copy", ("cuda",), {"device": "cpu"}, True),
        ("_to_copy", ("cuda",), {"device": "cpu", "non_blocking": True}, True),
        ("_to_copy", ("cpu",), {"device": "cuda"}, True),
        ("_to_copy", ("cpu",), {"device": "cuda", "non_blocking": True}, False),
        ("_to_copy", ("cuda",), {"dtype": torch.float64}, False),
        ("_to_copy", ("cuda",), {"device": "cuda"}, False),
        ("copy_", ("cpu", "cuda"), {}, True),
        ("copy_", ("cuda", "cpu"), {}, True),
        ("copy_", ("cuda", "cuda"), {}, False),
        ("copy_", ("cuda", "cpu", True), {}, False),
    ],
)
def test_device_copies(func, args, kwargs, found):
    """The rule on stand-ins for tensors, so that it is tested without an accelerator too."""

    class Stub:
        def __init__(self, device):
            self.device = torch.device(device)

    stubs = tuple(Stub(arg) if isinstance(arg, str) else arg for arg in args)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device(kwargs["device"])}
    offence = _copy_offence(getattr(torch.ops.aten, func).default, stubs, kwargs)
    assert (offence is not None) == found


def clean_loss(x):
    weights = torch.linspace(-1, 1, 32).view(8, 4)
    targets = torch.zeros(x.shape[0], dtype=torch.long)
    return F.cross_entropy(F.dropout(F.linear(x, weights)), targets)


def clean_attention(x):
    heads = x.view(1, 1, *x.shape)
    mask = torch.arange(x.shape[0])[:, None] >= torch.arange(x.shape[0])
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)


def clean_choice(x):
    scores = x.masked_fill(x < 0, -torch.inf).softmax(-1)
    chosen = scores.topk(2, -1).indices.sort(-1).values
    table = (chosen[..., None] == torch.arange(x.shape[-1])).any(-2)
    return torch.where(table, x, 0.0).gather(-1, chosen)


def clean_writes(x):
    y = x.clone()
    y[y > 1] = 0.0
    y[:, torch.arange(2)] = y.new_ones(())  # a Python number would be copied to the device
    y[0] = x[1]
    y.index_copy_(0, torch.arange(1), x[:1]).scatter_(
        0, torch.zeros(1, 4, dtype=torch.long), x[:1]
    )
    return y


def clean_types(x):
    y = x.to(torch.bfloat16).float().to(x.device).type_as(x).contiguous()
    return torch.cat([y, torch.zeros_like(y), y.new_full(y.shape, 2.0)]).view(-1)


CLEAN = {
    "loss": clean_loss,
    "attention": clean_attention,
    "causal": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "choice": clean_choice,
    "writes": clean_writes,
    "types": clean_types,
    "integer index": lambda x: x[torch.arange(2, -1, -2)][:, 1:][..., None, 0],
    "where": lambda x: torch.where(x > 0, x, -x).sum(),
    "one_hot": lambda x: F.one_hot(x[:, 0].long(), 8).float() @ torch.ones(8, 4),
    "embedding": lambda x: F.embedding(x[0].long(), torch.arange(32.0).view(8, 4), padding_idx=0),
    "repeat_interleave": lambda x: (
        x.repeat_interleave(torch.arange(1, 4), 0, output_size=6).repeat_interleave(2, 1).cumsum(0)
    ),
    "shapes": lambda x: x.reshape(-1, x.shape[-1]) * x.numel() * len(x) * (x.dtype == torch.int),
    "loop over rows": lambda x: torch.stack([row.exp() for row in x]),
    "autocast": lambda x: torch.autocast("cpu", torch.bfloat16)(torch.matmul)(x, x.T),
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_code_has_no_finding(name, device):
    with device:
        assert find_syncs(CLEAN[name], example()) == []
    with torch.device("meta"):
        assert find_value_reads(CLEAN[name], example()) == []


@pytest.mark.parametrize("name", ["loss", "attention", "choice", "writes", "where", "types"])
def test_clean_code_has_no_finding_in_backward(name, device):
    with device:
        x = example().requires_grad_()
        assert find_syncs(ForwardBackward(CLEAN[name]), x) == []
    # Tracing does not depend on the device, and torch 2.11 traces no ambient one.
    assert find_graph_breaks(CLEAN[name], example().requires_grad_()) == []


def test_detector_changes_no_result_and_leaves_no_mode():
    x = example()
    with SyncDetector() as detector:
        watched = clean_choice(x)
    assert torch.equal(watched, clean_choice(x))
    assert x[x > 0].numel()
    assert detector.findings == []


def test_compiled_code_is_watched_as_it_is():
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    @torch.compile(backend=backend, fullgraph=True)
    def rows(x):
        y = x.unflatten(0, (-1, 3))
        y[:, 0] = 1.0
        return y

    rows(example())
    assert find_syncs(rows, example()) == []
    rows(example())
    assert len(graphs) == 1


def test_compilation_itself_is_no_finding():
    @torch.compile(backend="aot_eager")
    def classes(x):
        return F.one_hot(x.long().clamp(0, 3), 4).float() + torch.tensor(1.0)

    classes(example())
    with SyncDetector() as detector:
        classes(example())
        classes(torch.ones(5, 4))
    assert detector.findings == []


def test_detector_is_not_compiled(capsys):
    def printing(x):
        print(x)
        return x + 1

    def frames() -> int:
        return torch._dynamo.utils.counters["frames"]["total"]

    compiled = torch.compile(printing, backend="eager")
    compiled(example())
    before = frames()
    with SyncDetector() as outer, SyncDetector() as inner:
        compiled(example())
    assert frames() == before
    for detector in (outer, inner):
        assert "printing a tensor" in [finding.detail for finding in detector.findings]
    # Frames of printing that were kept alive would have turned vmap off.
    rows = torch.vmap(torch.vmap(torch.ge, (None, 0)), (0, None))
    assert rows(torch.arange(3), torch.arange(3)).sum() == 6


def test_eager_flex_attention_runs_under_the_detector():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b, h, q, k):
        return q >= k

    query = torch.ones(1, 2, 16, 8)
    mask = create_block_mask(causal, None, None, 16, 16, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert find_syncs(flex_attention, query, query, query, block_mask=mask) == []


def test_same_place_is_reported_once():
    def loop(x):
        for _ in range(5):
            x = x * x.max().item()
        return x

    assert len(find_syncs(loop, example())) == 1


def test_error_of_the_function_is_raised():
    with pytest.raises(RuntimeError, match="shape"):
        find_syncs(lambda x: x @ x, example())


def test_forgotten_device_is_found_on_meta():
    copied, mixed = find_value_reads(lambda x: x[:, torch.arange(2)] + torch.zeros(2), example())
    assert copied.kind == "device-copy"
    assert "device" in mixed.detail


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4))
        self.table = torch.ones(4)

    def forward(self, x):
        return self.second(self.first(x)) * self.scale * self.table


def test_modules_run_on_meta_and_stay_as_they_were():
    module = Tied()
    x = example()
    copy = to_meta(module)
    assert copy.second.weight is copy.first.weight
    assert isinstance(copy.first.weight, torch.nn.Parameter)
    assert {t.device.type for t in [*copy.state_dict().values(), copy.table]} == {"meta"}
    for fn in (module, module.forward, lambda x: module(x), functools.partial(module)):
        assert find_value_reads(fn, x) == []
        assert find_value_reads(ForwardBackward(fn), x) == []
    assert module.scale.device.type == "cpu"
    assert module.first.weight.grad is None


def test_functions_run_on_meta_with_what_they_hold():
    weight = torch.ones(4)

    def countdown(x, steps=2, *, bias=weight):
        return countdown(x * weight + bias, steps - 1) if steps else x

    def with_default(x, weight=weight):
        return x * weight

    for fn in (countdown, with_default, torch.no_grad()(with_default)):
        assert find_value_reads(fn, example()) == []
        assert find_value_reads(lambda x, fn=fn: fn(x), example()) == []


def test_caches_and_other_objects_run_on_meta():
    class Cache:
        def __init__(self):
            self.device = torch.device("cpu")
            self.layers = [{"keys": torch.zeros(3, 4)}]

    def add(x, cache):
        return x + cache.layers[0]["keys"] + torch.ones(4, device=cache.device)

    cache = Cache()
    assert find_value_reads(add, example(), cache) == []
    assert cache.layers[0]["keys"].device.type == "cpu"


def test_objects_that_copy_themselves_run_on_meta():
    class Cache:
        def __init__(self):
            self.device = torch.device("cpu")
            self.weight = torch.ones(4)

        def __deepcopy__(self, memo):
            return self

    cache = Cache()
    assert find_value_reads(lambda x: x + cache.weight.to(cache.device), example()) == []
    assert cache.weight.device.type == "cpu"


def test_forward_backward_needs_a_gradient():
    with pytest.raises(ValueError, match="no output requires a gradient; pass inputs"):
        ForwardBackward(torch.sin)(example())


def test_graph_break_has_reason_and_line():
    def broken(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    (finding,) = find_graph_breaks(broken, example())
    assert finding.kind == "graph-break"
    assert "graph_break" in finding.detail
    assert f"{HERE}:" in finding.location
    assert finding.location.endswith("in broken")


@pytest.mark.parametrize("name", ["item", "if tensor", "tolist", "nonzero", "boolean index read"])
def test_value_read_breaks_the_graph(name):
    assert find_graph_breaks(OFFENDERS[name][0], example())


def test_function_that_is_skipped_whole_is_a_break():
    @torch._dynamo.disable
    def skipped(x):
        return x + 1

    assert find_graph_breaks(lambda x: skipped(x), example())


def test_graph_count_over_lengths():
    inputs = [(torch.ones(size, 4),) for size in (8, 9, 10, 33)]
    first = count_graphs(lambda x: x.sin(), inputs)
    assert first.graphs == 2
    (recompile,) = first.findings
    assert recompile.kind == "recompile"
    assert "size mismatch at index 0. expected 8, actual 9" in recompile.detail
    assert HERE in recompile.location
    assert count_graphs(lambda x: x.sin(), inputs, dynamic=True).graphs == 1
    every = count_graphs(lambda x: x.sin(), inputs, dynamic=False)
    assert every.graphs == 4
    assert len(every.findings) == 3


def test_graph_count_has_no_limit():
    inputs = [(torch.ones(size),) for size in range(2, 24)]
    assert count_graphs(lambda x: x.sin(), inputs, dynamic=False).graphs == 22


def test_graphs_on_disk_do_not_count():
    """Their guards would: those of the call that left them behind."""
    counters = torch._dynamo.utils.counters

    def hits() -> int:
        return sum(counters["aot_autograd"][f"autograd_cache_{x}"] for x in ("hit", "saved"))

    def fn(x):
        return x.sin() + 4.25

    def compiled_twice() -> None:
        for _ in range(2):
            torch._dynamo.reset()
            torch.compile(fn)(torch.ones(5))

    before = hits()
    count_graphs(fn, [(torch.ones(5),)], backend="inductor")
    count_graphs(fn, [(torch.ones(5),)], backend="inductor")
    assert hits() == before
    compiled_twice()
    assert hits() > before


def test_recompile_by_dtype_and_by_keyword():
    inputs = [{"x": torch.ones(4), "flag": 1}, {"x": torch.ones(4).double(), "flag": 1}]
    report = count_graphs(lambda x, flag: x + flag, inputs)
    assert report.graphs == 2
    assert "dtype mismatch" in report.findings[0].detail


def test_shape_branch_recompiles():
    def branch(x):
        return x + 1 if x.shape[0] > 16 else x - 1

    report = count_graphs(branch, [(torch.ones(size),) for size in (8, 9, 32)], dynamic=True)
    assert report.graphs == 2
    assert "16" in report.findings[0].detail


def test_check_and_assert_clean():
    x = example().requires_grad_()
    assert_clean(ForwardBackward(torch.sin), x)
    kinds = {finding.kind for finding in check(branch_on_tensor, x).findings}
    assert kinds == {"host-sync", "meta-run", "graph-break"}
    with pytest.raises(
        AssertionError, match=r"bool\(tensor\) at .*test_hot_path.py:\d+ in branch"
    ):
        assert_clean(branch_on_tensor, x)


def test_report_text():
    finding = Finding("host-sync", "Tensor.item()", "model.py:7 in forward")
    assert str(Report()) == "0 findings"
    assert str(Report((finding,), graphs=2)) == (
        "1 finding, 2 graphs\n  host-sync: Tensor.item() at model.py:7 in forward"
    )
    assert Report().ok
    assert not Report((finding,)).ok


# name: (function, text of the finding); on CUDA each is a blocking copy from pageable memory.
HOST_COPIES = {
    "tensor of a list": (lambda x: x * torch.tensor([1.0] * 4, device=x.device), "tensor copies"),
    "tensor of a number": (lambda x: x * torch.tensor(2.0, device=x.device), "tensor copies"),
    "as_tensor": (
        lambda x: x * torch.as_tensor([1.0] * 4, device=x.device),
        "as_tensor copies Python values",
    ),
    "asarray": (
        lambda x: x * torch.asarray([1.0] * 4, device=x.device),
        "asarray copies Python values",
    ),
    "array of numpy": (
        lambda x: x + torch.as_tensor(np.ones(4, np.float32), device=x.device),
        "as_tensor copies",
    ),
    "new_tensor": (lambda x: x * x.new_tensor([1.0] * 4), "new_tensor copies"),
    "to": (lambda x: x + torch.ones(4).to(x.device), "aten._to_copy.default copies"),
    "copy_": (lambda x: torch.empty_like(x).copy_(torch.ones(4)), "aten.copy_.default copies"),
    "index by a list": (lambda x: x[:, [0, 1]], "indexing by a list"),
    "write by a list": (lambda x: x.clone().__setitem__([0, 1], x[:2]), "indexing by a list"),
    "index by a tensor of the host": (lambda x: x[torch.arange(2)], "aten.index.Tensor copies"),
}
NO_COPIES = {
    "number of the host": lambda x: x * torch.tensor(2.0),
    "full": lambda x: x * torch.full((4,), 2.0, device=x.device),
    "arange": lambda x: x[:, torch.arange(2, device=x.device)] + x.new_ones(2),
    "without waiting": lambda x: x + torch.ones(4).to(x.device, non_blocking=True),
    "from itself": lambda x: torch.as_tensor(x, device=x.device) + torch.asarray(x),
    "slices": lambda x: x[:, 1:][0, ..., None] + x[(0, 1)],
}


@pytest.mark.parametrize("name", HOST_COPIES)
def test_copy_from_the_host_is_seen_without_a_device(name):
    fn, detail = HOST_COPIES[name]
    (finding,) = find_value_reads(fn, example())
    assert finding.kind == "device-copy"
    assert finding.detail.startswith(detail)
    assert HERE in finding.location


@pytest.mark.gpu
@pytest.mark.parametrize("name", HOST_COPIES)
def test_copy_from_the_host_is_one_on_cuda(name):
    assert find_syncs(HOST_COPIES[name][0], example().cuda())


@pytest.mark.parametrize("name", NO_COPIES)
def test_no_copy_from_the_host(name):
    assert find_value_reads(NO_COPIES[name], example()) == []


def test_code_is_compiled_under_the_watch_without_a_break():
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x):
        return (x * torch.tensor([1.0] * 4, device=x.device))[[0, 1]]

    recording = Recording()
    with watch_host_copies(recording):
        assert torch.equal(compiled(example()), example()[:2])
    assert recording.findings == []


def test_copies_before_the_first_read_are_all_found():
    def step(x):
        x = x * torch.tensor([2.0] * 4, device=x.device)
        return (x + x.new_tensor([1.0] * 4)) * x.max().item()

    kinds = [finding.kind for finding in find_value_reads(step, example())]
    assert kinds == ["device-copy", "device-copy", "meta-run"]
    assert torch.tensor([1.0]).device.type == "cpu"
    assert torch.tensor.__name__ == "tensor"
    assert not hasattr(torch.tensor, "__wrapped__")


def test_tensors_are_no_sequences_after_the_detectors() -> None:
    """A method set on Tensor and taken off again would make torch.tensor fail on scalars."""
    find_value_reads(lambda x: x[[0, 1]], [torch.ones(3)])
    assert torch.tensor([torch.tensor(3)]).tolist() == [3]
