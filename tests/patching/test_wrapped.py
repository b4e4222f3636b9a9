"""A model that something has wrapped is refused; wrapping a patched one works."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from distributed.ranks import start_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import nsa_flex
from nsa_flex.compression import Compression
from nsa_flex.gates import Gates
from nsa_flex.sharded import is_sharded
from patching.own_adapters import takes_own_adapters
from patching.tiny_models import NSA, tiny_model, tokens


@pytest.fixture
def one_process(tmp_path: Any) -> Any:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def refused(model: nn.Module, message: str) -> None:
    """`patch` refuses `model` and leaves it as it was."""
    before = {name: id(x) for name, x in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        nsa_flex.patch(model, NSA)
    assert {name: id(x) for name, x in model.named_parameters()} == before
    assert not [name for name, _ in model.named_modules() if name.endswith("nsa")]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("inner", ["ddp", "ddp.module", "ddp.module.model"])
def test_ddp_comes_after_patch(inner: str) -> None:
    ddp = DistributedDataParallel(tiny_model())
    model = {"ddp": ddp, "ddp.module": ddp.module, "ddp.module.model": ddp.module.model}[inner]
    refused(model, r"wrapped by DistributedDataParallel .* call nsa_flex\.patch first, then wrap")


@pytest.mark.usefixtures("one_process")
def test_a_model_taken_out_of_ddp_is_patched() -> None:
    model = DistributedDataParallel(tiny_model()).module
    assert nsa_flex.patch(model, NSA) is model


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("inner", [True, False])
def test_fully_shard_comes_after_patch(inner: bool) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = tiny_model()
    fully_shard(model.model.layers[1] if inner else model, mesh=mesh)
    refused(model, r"sharded by fully_shard already.*call nsa_flex\.patch first")
    refused(model.model.layers[1].self_attn, r"sharded by fully_shard already")


@pytest.mark.usefixtures("one_process")
def test_sharded_parameters_are_named() -> None:
    model = tiny_model()
    projection = model.model.layers[1].self_attn.q_proj
    mesh = init_device_mesh("cpu", (1,))
    projection.weight = nn.Parameter(distribute_tensor(projection.weight.detach(), mesh))
    refused(model, r"layers\.1\.self_attn\.q_proj\.weight is a DTensor.*nsa_flex\.patch first")


OWN = pytest.param("add_adapter", marks=takes_own_adapters)


@pytest.mark.parametrize("through", ["get_peft_model", OWN, "base_model"])
def test_peft_comes_after_patch(through: str) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = tiny_model()
    if through == "add_adapter":
        model.add_adapter(config)
    else:
        wrapped = peft.get_peft_model(model, config)
        model = wrapped if through == "get_peft_model" else wrapped.base_model.model
    refused(model, r'PEFT adapters already.*base model first.*modules_to_save=\["nsa"\]')


def test_two_processes(tmp_path: Any) -> None:
    """All that needs two ranks, in one pair of processes: they take seconds to start."""
    start_ranks(2, run_checks, f"file://{tmp_path}/rendezvous")


def run_checks(rank: int, rendezvous: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    for check in (
        ddp_synchronises_what_patch_added,
        fsdp_starts_from_the_meta_device,
        nsa_layers_sharded_by_themselves,
        fsdp_as_the_page_says,
    ):
        torch.manual_seed(rank)  # each rank has random weights of its own
        check()
    dist.destroy_process_group()


def ddp_synchronises_what_patch_added() -> None:
    model = DistributedDataParallel(nsa_flex.patch(tiny_model().train(), NSA))
    step(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert_same_on_all_ranks(parameter.detach(), name)


def fsdp_starts_from_the_meta_device() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = nsa_flex.patch(tiny_model().train(), NSA, init="dense")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with poisoned(model):
        model.init_weights()
    for name, parameter in model.named_parameters():
        assert is_sharded(parameter), name
        assert_same_on_all_ranks(parameter.full_tensor(), name)
    starts(model, lambda x: x.full_tensor() if is_sharded(x) else x)
    before = model.model.layers[0].self_attn.nsa.gates.linear.weight.full_tensor()
    step(model)
    after = model.model.layers[0].self_attn.nsa.gates.linear.weight.full_tensor()
    assert not torch.equal(before, after)


def nsa_layers_sharded_by_themselves() -> None:
    torch.manual_seed(0)
    model = nsa_flex.patch(tiny_model().train(), NSA)
    twin = copy.deepcopy(model)
    for layer in model.model.layers:
        fully_shard(layer.self_attn.nsa, mesh=init_device_mesh("cpu", (2,)))
    ids = tokens(2, 40)
    for each in (model, twin):
        each(ids, labels=ids, use_cache=False).loss.backward()
    for (name, found), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        gradient = found.grad.full_tensor() if is_sharded(found) else found.grad
        torch.testing.assert_close(gradient, expected.grad, msg=name)
    with pytest.raises(ValueError, match=r"φ is sharded by itself.*fully_shard the decoder layer"):
        model.eval().generate(ids, max_new_tokens=2)


def fsdp_as_the_page_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "guide" / "train.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        exec(blocks[0], names)
        exec(next(block for block in blocks if "fully_shard" in block), names)
        names["train_sharded"](init_device_mesh("cpu", (2,)))
        os.chdir("/")  # the folder is about to go


def step(model: nn.Module) -> None:
    """One step on a batch that differs from rank to rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = tokens(2, 40)
    model(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()


class poisoned:
    """Every parameter and buffer NaN, so that what stays uninitialised shows."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        with torch.no_grad():
            for x in [*self.model.parameters(), *self.model.buffers()]:
                x.fill_(float("nan"))

    def __exit__(self, *_: Any) -> None:
        for name, x in [*self.model.named_parameters(), *self.model.named_buffers()]:
            assert not (x.full_tensor() if is_sharded(x) else x).isnan().any(), name


def starts(model: nn.Module, whole: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """That φ and gates of `model`, patched with init="dense", are at their start."""
    phi = [module for module in model.modules() if isinstance(module, Compression)]
    gates = [module for module in model.modules() if isinstance(module, Gates)]
    assert (len(phi), len(gates)) == (4, 2)
    for each in phi:
        for weight in (whole(each.hidden_weight), whole(each.output_weight)):
            assert torch.equal(weight[0], weight[1])
            assert weight[0].std() > 0
        assert not whole(each.position).any()
    for gate in gates:
        assert gate.offset.tolist() == [-0.5, 0.5, -0.5]
        assert not whole(gate.linear.weight).any()


def assert_same_on_all_ranks(x: Tensor, name: str) -> None:
    others = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(others, x.contiguous())
    assert all(torch.equal(x, other) for other in others), name


def test_init_weights_on_one_device() -> None:
    with torch.device("meta"):
        model = nsa_flex.patch(tiny_model(), NSA, init="dense")
    model.to_empty(device="cpu")
    with poisoned(model):
        model.init_weights()
    starts(model)


def test_init_weights_leaves_trained_parameters_alone() -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model.init_weights()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_unpatch_gives_the_initialisation_back() -> None:
    model = nsa_flex.unpatch(nsa_flex.patch(tiny_model(), NSA))
    assert "_init_weights" not in vars(model.model)
