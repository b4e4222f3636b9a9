"""Forms of parallelism side by side: losses of 300 steps, and long rows of 8B-shaped layers.

    torchrun --nproc-per-node 4 -m nsa_flex.bench.tools.parallel_runs losses --out losses.json
    torchrun --nproc-per-node 4 -m nsa_flex.bench.tools.parallel_runs layers --out layers.json

`losses` trains the same small Llama on the same batches on one process, and on all with DDP,
FSDP2, context parallelism, tensor parallelism, tokens exchanged for heads (`sp`), and FSDP2 beside
context parallelism where the ranks are two pairs or more. `layers` times steps of Llama-3.1-8B's
layers on rows of 128k tokens, each recomputed in its backward, with FSDP2 alone and beside context
parallelism of 2. The JSON is written after each form, and a PNG of the losses beside it. Without
CUDA all is small, on gloo.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import nsa_flex
from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.measure import machine
from nsa_flex.bench.measure.timing import peak_of, reset_peak
from nsa_flex.bench.report.losses import draw
from nsa_flex.config import NSAConfig
from nsa_flex.parallel.heads import HeadShards
from nsa_flex.training.config import EngineSection
from nsa_flex.training.models import prepare

Batch = dict[str, Any]  # of tensors: arguments by name


@dataclass(frozen=True)
class Size:
    """A Llama, what it is trained on, and for how many steps.

    Args:
        rows: of a step, on all ranks together.
        warm_up: steps of `layers` that are not timed.
    """

    num_layers: int
    hidden_size: int
    mlp_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    seq_len: int
    rows: int
    steps: int
    warm_up: int = 0
    checkpointing: Literal["none", "full"] = "none"
    dtype: torch.dtype = torch.float32
    config: NSAConfig = field(default_factory=NSAConfig)


TINY = NSAConfig(8, 4, 8, 4, window_size=16)
LOSSES = {
    "cuda": Size(
        *(4, 256, 768, 8, 4, 64, 4096, 2048, 8, 300),
        config=NSAConfig(num_selected_blocks=8, window_size=256),
    ),
    "cpu": Size(2, 64, 128, 4, 4, 16, 256, 128, 4, 300, config=TINY),
}
LAYERS = {
    "cuda": Size(
        *(4, 4096, 14336, 32, 8, 128, 32000, 131072, 4, 3),
        warm_up=2,
        checkpointing="full",
        dtype=torch.bfloat16,
    ),
    "cpu": Size(2, 64, 128, 4, 2, 16, 64, 256, 4, 1, warm_up=1, checkpointing="full", config=TINY),
}


@dataclass(frozen=True)
class Form:
    """A model that is spread over ranks.

    Args:
        model: what is called.
        share: this rank's part of a batch of whole rows.
        ranks: how many work.
        around: entered while it trains.
    """

    model: nn.Module
    share: Callable[[Batch], Batch]
    ranks: int
    around: AbstractContextManager[Any] = field(default_factory=nullcontext)


def one(model: Any, size: Size, device: torch.device) -> Form:
    """One process, whatever the others do."""
    return Form(model, lambda batch: batch, 1)


def ddp(model: Any, size: Size, device: torch.device) -> Form:
    """Rows over ranks."""
    return Form(_ddp(model, device), _own_rows(dist.get_rank(), _world()), _world())


def fsdp(model: Any, size: Size, device: torch.device) -> Form:
    """Rows and parameters over ranks."""
    _shard(model, init_device_mesh(device.type, (_world(),)))
    return Form(model, _own_rows(dist.get_rank(), _world()), _world())


def cp(model: Any, size: Size, device: torch.device) -> Form:
    """Tokens over ranks."""
    mesh = init_device_mesh(device.type, (_world(),))
    nsa_flex.context_parallel(model, mesh)
    return Form(_ddp(model, device), _own_tokens(mesh, size), _world())


def tp(model: Any, size: Size, device: torch.device) -> Form:
    """Heads and columns over ranks."""
    nsa_flex.tensor_parallel(model, init_device_mesh(device.type, (_world(),)))
    return Form(model, lambda batch: batch, _world())


def sp(model: Any, size: Size, device: torch.device) -> Form:
    """A run of tokens a rank, exchanged for heads in attention by DeepSpeed's protocol."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mesh = init_device_mesh(device.type, (_world(),))
    shards, attend = HeadShards(mesh), ALL_ATTENTION_FUNCTIONS["nsa_flex"]
    nsa_flex.sequence_parallel(model, mesh)

    def exchanging(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        options["position_ids"] = shards.gather_rows(options["position_ids"])
        whole = (shards.gather_tokens(x) for x in (query, key, value))
        output, _ = attend(module, *whole, None, **options)  # [B, S, Hq / P, Dv]
        heads = DTensor.from_local(output.contiguous(), mesh, [Shard(2)], run_check=False)
        return heads.redistribute(placements=[Shard(1)]).to_local(), None

    @contextmanager
    def registered() -> Iterator[None]:
        ALL_ATTENTION_FUNCTIONS["nsa_flex"] = exchanging
        try:
            yield
        finally:
            del ALL_ATTENTION_FUNCTIONS["nsa_flex"]  # of this dictionary's own; the former is back

    return Form(_ddp(model, device), _own_run(shards), _world(), registered())


def fsdp_cp(model: Any, size: Size, device: torch.device) -> Form:
    """Rows and parameters over pairs of ranks, tokens over the two of a pair."""
    names = ("cp", "dp")
    mesh = init_device_mesh(device.type, (2, _world() // 2), mesh_dim_names=names)
    nsa_flex.context_parallel(model, mesh["cp"])
    _shard(model, mesh)
    rows = _own_rows(mesh["dp"].get_local_rank(), mesh["dp"].size())
    tokens = _own_tokens(mesh["cp"], size)
    return Form(model, lambda batch: tokens(rows(batch)), _world())


FORMS = {"one": one, "ddp": ddp, "fsdp": fsdp, "cp": cp, "tp": tp, "sp": sp, "fsdp_cp": fsdp_cp}


def train(name: str, size: Size, device: torch.device) -> dict[str, Any]:
    """Loss of each step, the mean over ranks, and seconds of all."""
    form = FORMS[name](_build(size, device), size, device)
    # One parameter at a time: lists that mix DTensors and plain tensors are refused.
    optimizer = torch.optim.AdamW(form.model.parameters(), lr=1e-3, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20))
    found: list[Tensor] = []
    start = time.perf_counter()
    with form.around:
        for step in range(size.steps):
            batch = form.share(_rows_of_a_chain(size, step, device))
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = form.model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found.append(loss.detach())
    losses = torch.stack(found)
    if form.ranks > 1:
        dist.all_reduce(losses)
        losses /= form.ranks
    seconds = time.perf_counter() - start
    return {"ranks": form.ranks, "losses": losses.tolist(), "seconds": round(seconds, 2)}


def time_layers(name: str, size: Size, device: torch.device) -> dict[str, Any]:
    """Seconds of a step of forward, backward and AdamW; tokens a second and the peak of a rank."""
    form = FORMS[name](_build(size, device), size, device)
    optimizer = torch.optim.AdamW(form.model.parameters(), lr=1e-5, foreach=False)
    # FSDP2 alone has a row a rank, and beside context parallelism of 2 a row a pair.
    rows = form.ranks // (2 if name == "fsdp_cp" else 1)
    ids = torch.randint(size.vocab_size, (rows, size.seq_len), device=device)
    batch = form.share({"input_ids": ids, "labels": ids})
    seconds = []
    reset_peak(device)
    for _ in range(size.warm_up + size.steps):
        _synchronize(device)
        start = time.perf_counter()
        form.model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    timed = sorted(seconds[size.warm_up :])
    median = timed[len(timed) // 2]
    return {
        "ranks": form.ranks,
        "rows": rows,
        "seconds": [round(x, 4) for x in timed],
        "tokens_per_second": round(rows * size.seq_len / median),
        "peak_bytes": peak_of(device),
    }


def _build(size: Size, device: torch.device) -> Any:
    """The same model on every rank, patched, each layer compiled on CUDA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.mlp_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_query_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.seq_len,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config)
        nsa_flex.patch(model.to(size.dtype).train(), size.config)
    compiled = device.type == "cuda" and size.checkpointing != "none"
    prepare(model, EngineSection(compile=compiled, checkpointing=size.checkpointing))
    return model


SUCCESSORS = 4  # of a token, equally likely


def _rows_of_a_chain(size: Size, step: int, device: torch.device) -> Batch:
    """Rows of a Markov chain whose second half is the first again.

    Its many tokens are learned one by one, so that the loss falls for hundreds of steps; copies
    are what attention far back can learn.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = (size.vocab_size, SUCCESSORS)
    successors = torch.randint(size.vocab_size, sizes, generator=generator)
    generator.manual_seed(1 + step)
    shape = (size.rows, size.seq_len // 2)
    turns = torch.randint(SUCCESSORS, shape, generator=generator)
    tokens = [torch.randint(size.vocab_size, shape[:1], generator=generator)]
    for turn in turns[:, 1:].unbind(1):
        tokens.append(successors[tokens[-1], turn])
    ids = torch.stack(tokens, 1).repeat(1, 2).to(device)
    return {"input_ids": ids, "labels": ids}


def _own_rows(rank: int, ranks: int) -> Callable[[Batch], Batch]:
    return lambda batch: {name: x.chunk(ranks)[rank] for name, x in batch.items()}


def _own_tokens(mesh: DeviceMesh, size: Size) -> Callable[[Batch], Batch]:
    return lambda batch: nsa_flex.shard_batch(mesh=mesh, config=size.config, **batch)


def _own_run(shards: HeadShards) -> Callable[[Batch], Batch]:
    def share(batch: Batch) -> Batch:
        following = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        whole = {**batch, "shift_labels": following}
        own = {name: shards.own_tokens(x).contiguous() for name, x in whole.items()}
        return {**own, "num_items_in_batch": (following != -100).sum() / shards.size}

    return share


def _ddp(model: Any, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model, [device.index] if device.type == "cuda" else None)


def _shard(model: Any, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _world() -> int:
    return dist.get_world_size()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget(device: torch.device) -> None:
    gc.collect()  # a wrapper and its model point at one another
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(
    what: str, forms: list[str], size: Size, device: torch.device, out: Path
) -> dict[str, Any]:
    """Runs the forms one after another; rank 0 writes what there is after each."""
    run = train if what == "losses" else time_layers
    sizes = {**asdict(size), "dtype": str(size.dtype).removeprefix("torch.")}
    found: dict[str, Any] = {"size": sizes, "forms": {}, **machine.describe(device)}
    for name in forms:
        if name != "one" or dist.get_rank() == 0:
            found["forms"][name] = run(name, size, device)
        _forget(device)
        dist.barrier()
        if dist.get_rank() == 0:
            out.write_text(json.dumps(found, indent=1) + "\n")
            print(name, {k: v for k, v in found["forms"][name].items() if k != "losses"})
    return found


def main() -> None:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("losses", "layers"))
    parser.add_argument(
        "--forms", nargs="+", choices=tuple(FORMS), help="all that fit if left out"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--draw", action="store_true", help="draw what --out has, and run nothing")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(json.loads(arguments.out.read_text()), arguments.out.with_suffix(".png"))
        return
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"device_id": device} if kind == "cuda" else {}
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", **options)
    paired = _world() % 2 == 0 and _world() > 2
    every = list(FORMS) if arguments.what == "losses" else ["fsdp", "fsdp_cp"]
    forms = arguments.forms or [name for name in every if name != "fsdp_cp" or paired]
    size = (LOSSES if arguments.what == "losses" else LAYERS)[kind]
    found = measure(arguments.what, forms, size, device, arguments.out)
    if arguments.what == "losses" and dist.get_rank() == 0:
        draw(found, arguments.out.with_suffix(".png"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
