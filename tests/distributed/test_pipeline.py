"""Layers over ranks or devices: pipeline stages of a patched model, and `device_map`."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import send_to_device
from distributed.problem import (
    CONFIG,
    DTYPE,
    LENGTH,
    SIZES,
    Result,
    assert_equal,
    gradients,
)
from distributed.ranks import TWO_GPUS, on_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

import nsa_flex
from nsa_flex.cache.columns import incoming_batch
from nsa_flex.patching import packed_rows
from nsa_flex.patching.rows import CallContext
from patching.tiny_models import NSA, moved, relative_error, tiny_model, tokens

LIMIT = 1e-10


class Stage(nn.Module):
    """Some layers of a decoder: the decoder itself, without the others."""

    def __init__(self, model: Any, first: int, last: int) -> None:
        super().__init__()
        self.is_first, self.is_last = first == 0, last == len(model.model.layers)
        self.decoder, self.head = model.model, model.lm_head if self.is_last else None
        self.decoder.layers = self.decoder.layers[first:last]
        self.decoder.config.num_hidden_layers = last - first
        if not self.is_first:
            self.decoder.embed_tokens = None
        if not self.is_last:
            self.decoder.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        call = {"input_ids" if self.is_first else "inputs_embeds": x}
        hidden = self.decoder(**call, use_cache=False).last_hidden_state
        return hidden if self.head is None else self.head(hidden)


def patched(kind: str = "cpu") -> Any:
    """For devices of a kind, in float64 on the CPU."""
    torch.manual_seed(7)
    dense = tiny_model(num_hidden_layers=4, **SIZES[kind])
    return moved(nsa_flex.patch(dense, CONFIG[kind]), scale=0.1).train()


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_pipeline_stages(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, stages)


def stages(device: torch.device) -> None:
    ids = batch(device)
    whole = of_one_process(patched(), ids)
    found = of_stages(patched(), ids)
    for name, gradient in found.gradients.items():
        want = whole.gradients[name]
        assert (gradient - want).norm() / want.norm().clamp_min(1e-6) < LIMIT, name
    assert relative_error(found.loss, whole.loss) < LIMIT


@pytest.mark.gpu
@TWO_GPUS
def test_pipeline_stages_on_two_gpus(tmp_path: Path) -> None:
    on_ranks(2, "cuda", tmp_path, stages_on_gpus)


def stages_on_gpus(device: torch.device) -> None:
    """As far from float64 as one process is, in the GPU's dtype."""
    ids, kind = batch(device), device.type
    exact = of_one_process(patched(kind), ids.cpu())
    models = [patched(kind).to(device, DTYPE[kind]) for _ in range(2)]
    plain, found = of_one_process(models[0], ids), of_stages(models[1], ids)
    own = found.gradients
    exact = Result(exact.loss, {name: exact.gradients[name] for name in own})
    assert_equal("pipeline", found, plain, exact)


def batch(device: torch.device) -> Tensor:
    torch.manual_seed(8)
    return tokens(4, LENGTH[device.type]).to(device)


def of_one_process(model: Any, ids: Tensor) -> Result:
    loss = loss_of(model(ids, use_cache=False).logits, ids)
    loss.backward()
    return Result(loss.detach(), gradients(model))


def of_stages(model: Any, ids: Tensor) -> Result:
    """The loss, on both ranks, and the gradients of this rank's stage, by their model's names."""
    rank = dist.get_rank()
    part = Stage(model, 2 * rank, 2 * rank + 2)
    schedule = ScheduleGPipe(PipelineStage(part, rank, 2, ids.device), 2, loss_fn=loss_of)
    losses: list[Tensor] = []
    schedule.step(ids) if rank == 0 else schedule.step(target=ids, losses=losses)
    loss = torch.zeros((), dtype=torch.float64, device=ids.device)
    if losses:
        loss += torch.stack(losses).mean().detach()
    dist.all_reduce(loss)
    found = {}
    for name, gradient in gradients(part).items():
        name = re.sub(r"(?<=layers\.)\d+", lambda x: str(int(x[0]) + 2 * rank), name)
        found[name.replace("decoder.", "model.").replace("head.", "lm_head.")] = gradient
    return Result(loss, found)


def test_layers_outside_their_decoder_are_refused() -> None:
    """As a stage that calls them itself has them."""
    model = patched()
    x = torch.randn(1, 40, 32, dtype=torch.float64)
    places = model.model.rotary_emb(x, torch.arange(40)[None])
    with pytest.raises(RuntimeError, match="it was called outside its decoder"):
        model.model.layers[0](x, position_embeddings=places)


def test_pipelines_of_transformers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    patched().save_pretrained(tmp_path / "model")
    on_ranks(2, "cpu", tmp_path, transformers_pipeline, tmp_path / "model")


def transformers_pipeline(_device: torch.device, path: Path) -> None:
    config = transformers.distributed.DistributedConfig(pp_size=2)
    with pytest.raises(ValueError, match=r"pp_size=2 .* pipeline .* torch.distributed.pipelining"):
        nsa_flex.load(path, distributed_config=config)


def test_what_layers_are_told_moves_to_their_device() -> None:
    """accelerate's hooks of a `device_map` send a layer's arguments on."""
    layout = nsa_flex.align_positions(torch.arange(40).remainder(17)[None], NSA)
    context = CallContext(rows=packed_rows(layout), passed=("input_ids",))
    sent = send_to_device(context, "meta")
    assert type(sent) is CallContext
    assert sent.passed == context.passed
    for x, y in zip(context.rows.queries, sent.rows.queries, strict=True):
        if isinstance(x, Tensor):
            assert (y.device.type, y.shape) == ("meta", x.shape)
        else:
            assert y == x


def test_padding_moves_to_the_device_of_a_cached_layer() -> None:
    """A decoder tells all layers of it at once, on the device of its tokens."""
    phi = nsa_flex.Compression(NSA, 2, 8, device="meta")
    cache = nsa_flex.LayerCache(phi, phi)
    real = torch.ones(2, 40)
    real[0, :9] = 0
    cache.expect(incoming_batch(real))
    key = torch.empty(2, 2, 40, 8, device="meta")
    with torch.no_grad():
        found, _ = cache.update(key, key)
    assert found.device.type == "meta"
    assert cache.incoming is not None
    tensors = [x for x in (*cache.incoming, *cache.incoming.layout) if isinstance(x, Tensor)]
    assert len(tensors) >= 3
    assert {x.device.type for x in tensors} == {"meta"}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@TWO_GPUS
def test_device_map_over_two_gpus(kind: str, tmp_path: Path) -> None:
    """Layers of a model on two GPUs, loaded so or dispatched later, find what one GPU finds."""
    from accelerate import dispatch_model

    torch.manual_seed(9)
    sizes = {"hidden_size": 256, "head_dim": 64}
    config = nsa_flex.NSAConfig(num_selected_blocks=5, window_size=128, compression="mlp")
    nsa_flex.patch(tiny_model(**sizes), config).to(torch.bfloat16).save_pretrained(tmp_path)
    # Loaded as well: `.to` rounds the frequencies of the rotary embedding, which no file holds.
    model = nsa_flex.load(tmp_path, dtype=torch.bfloat16).cuda()
    places = {
        "model.embed_tokens": 0,
        "model.rotary_emb": 0,
        "model.layers.0": 0,
        "model.layers.1": 1,
        "model.norm": 1,
        "lm_head": 1,
    }
    loaded = nsa_flex.load(tmp_path, device_map=places, dtype=torch.bfloat16)
    assert loaded.model.layers[1].self_attn.nsa.gates.linear.weight.device.index == 1
    dispatched = dispatch_model(copy.deepcopy(model), places)
    ids = tokens(2, 640).cuda()
    call: dict[str, Any] = {"input_ids": ids}
    if kind == "padded":
        call["attention_mask"] = torch.ones_like(ids)
        call["attention_mask"][0, :100] = 0
    if kind == "packed":
        row = torch.cat([torch.arange(x) for x in (300, 3, 337)]).cuda()
        call["position_ids"] = row.expand(2, -1)
    with torch.no_grad():
        expected = model(**call, use_cache=False).logits
        for other in (loaded, dispatched):
            found = other(**call, use_cache=False).logits.to(expected.device)
            real = call.get("attention_mask", torch.ones_like(ids)) != 0
            assert torch.equal(found[real], expected[real])
    if kind == "packed":
        return
    for implementation in (None, "static"):
        options = {
            "max_new_tokens": 12,
            "do_sample": False,
            "cache_implementation": implementation,
            "disable_compile": True,
        }
        wanted = model.generate(**call, **options)
        for other in (loaded, dispatched):
            assert torch.equal(other.generate(**call, **options).cuda(0), wanted)
