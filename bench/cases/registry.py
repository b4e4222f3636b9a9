"""The one registry of what can be measured, and the presets: lists of cases by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

from nsa_flex.bench.cases.branches import DETERMINISTIC, Compressed, Selected, Sliding
from nsa_flex.bench.cases.case import Case, Pattern
from nsa_flex.bench.cases.checkpoints import INFLLM_V2, MINIMAX_M3, NSA_1B, InfLLMV2, MiniMaxM3
from nsa_flex.bench.cases.compile_time import CompileCase
from nsa_flex.bench.cases.core import PACKED, Core
from nsa_flex.bench.cases.layers import IMPLEMENTATIONS as LAYERS
from nsa_flex.bench.cases.layers import LayerCase
from nsa_flex.bench.cases.models import IMPLEMENTATIONS, WHOLE, ModelCase
from nsa_flex.bench.cases.parts import Choice, CompressionTarget, Merge
from nsa_flex.bench.cases.targets import Target
from nsa_flex.config import CompressionKind, NSAConfig
from nsa_flex.infllm import InfLLMV2Config

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Core(),
        Compressed(),
        Selected(),
        Sliding(),
        Choice(),
        Merge(),
        CompressionTarget(),
        InfLLMV2(),
        MiniMaxM3(),
    )
}
PARTS = ("compressed", "selected", "sliding", "choice", "merge", "compression")  # of the core

AnyCase = Case | ModelCase | LayerCase | CompileCase
Heads = tuple[int, int]

KI = 1024
MODEL_HEADS: tuple[Heads, ...] = ((64, 4), (32, 8), (16, 16))
# G of 1, 4, 8 and 16.
GROUPS: tuple[Heads, ...] = ((16, 16), (32, 8), (32, 4), (64, 4))
DIMS = ((64, 64), (128, 128), (192, 128))
# Heads and head dim of Llama 3.2 1B and 3B, Qwen2.5 1.5B, 7B and 14B: G of 4, 3, 6, 7 and 5.
FAMILIES: tuple[tuple[Heads, int], ...] = (
    ((32, 8), 64),
    ((24, 8), 128),
    ((12, 2), 128),
    ((28, 4), 128),
    ((40, 8), 128),
)


def grid(
    target: str,
    implementations: tuple[str, ...],
    heads: tuple[Heads, ...],
    lengths: tuple[int, ...],
    *,
    dims: tuple[tuple[int, int], ...] = ((128, 128),),
    train: tuple[bool, ...] = (False, True),
    **others: object,
) -> list[Case]:
    """The product, longest last: what is quick comes first. Targets without a backward skip it."""
    trains = [each for each in train if TARGETS[target].trains or not each]
    return [
        Case(
            target,
            implementation,
            each,
            seq_len=length,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=dim,
            value_dim=value_dim,
            **others,  # type: ignore[arg-type]
        )
        for length in lengths
        for query_heads, kv_heads in heads
        for dim, value_dim in dims
        for implementation in implementations
        for each in trains
    ]


def headline() -> list[Case]:
    """Core against cuDNN, 8k to 128k."""
    lengths = (8 * KI, 32 * KI, 64 * KI, 128 * KI)
    return grid("core", ("nsa", "sdpa-cudnn"), MODEL_HEADS, lengths)


def quick() -> list[Case]:
    """A first look: core against cuDNN and branches at one shape, under a minute."""
    heads: tuple[Heads, ...] = ((32, 8),)
    cases = grid("core", ("nsa", "sdpa-cudnn"), heads, (8 * KI, 32 * KI))
    return cases + branches(heads, 8 * KI)


def branches(heads: tuple[Heads, ...] | None = None, length: int = 64 * KI) -> list[Case]:
    """Every part of the core on all that offer it, at 64k tokens and for 32/8 at 8k."""
    shapes = {length: heads} if heads else {8 * KI: MODEL_HEADS[1:2], 64 * KI: MODEL_HEADS}
    return [
        case
        for length, heads in shapes.items()
        for name in PARTS
        for case in grid(name, compiled_without_scores(name), heads, (length,))
    ]


def compiled_without_scores(target: str) -> tuple[str, ...]:
    """Its implementations, but those that keep all scores, are not compiled or deterministic."""
    every = TARGETS[target].implementations()
    left_out = ("eager", "deterministic")
    return tuple(name for name in every if name != "dense" and not name.endswith(left_out))


def eager() -> list[Case]:
    """Every part compiled and not, and on scores kept in memory, at 4k tokens."""
    cases = []
    for name in PARTS:
        cases += grid(name, TARGETS[name].implementations(), ((32, 8),), (4 * KI,))
    return cases


def packed() -> list[Case]:
    """64k tokens of equal documents: packed, as batch rows, and dense on FA-2 varlen.

    Of documents no longer than a choice also with their length told: it decides which kernels run.
    """
    names = ("nsa-packed", "nsa", "fa2-varlen")
    cases = []
    for documents in (8, 16, 64):
        length = 64 * KI // documents
        told = ("nsa-packed-told",) if length <= NSAConfig().num_selected_tokens else ()
        cases += [
            replace(case, batch=documents)
            for case in grid("core", (*names[:1], *told, *names[1:]), MODEL_HEADS, (length,))
        ]
    return cases


def layers() -> list[AnyCase]:
    """A Llama layer on 64k tokens of equal documents, as batch rows and packed in two ways."""
    return [
        LayerCase(name, documents, 64 * KI // documents, query_heads, kv_heads)
        for query_heads, kv_heads in MODEL_HEADS
        for documents in (8, 16, 64)
        for name in LAYERS
    ]


def overlap() -> list[Case]:
    """Selection on choices that overlap little, by 88 to 92 %, and as a trained model's do.

    Where they overlap little, by the deterministic backward as well.
    """
    cases = []
    for pattern in ("random", "overlap"):
        lengths = (8 * KI, 64 * KI)
        cases += grid("selected", ("triton",), MODEL_HEADS, lengths, pattern=pattern)
    cases += grid("selected", (DETERMINISTIC,), MODEL_HEADS, (64 * KI,), train=(True,))
    cases += grid("core", ("nsa",), MODEL_HEADS[:2], (64 * KI,), pattern="overlap")
    return cases + trained()


def trained() -> list[Case]:
    """Selection on the recorded choices of the demo's model, and random ones of that length."""
    return [
        case
        for pattern in ("random", "trained")
        for case in grid("selected", ("triton",), MODEL_HEADS, (16 * KI,), pattern=pattern)
    ]


def sweep() -> list[Case]:
    """The core at 32/8, 1k to 256k tokens; all its implementations at 1k, 4k, 16k and 64k."""
    heads: tuple[Heads, ...] = ((32, 8),)
    every = tuple(name for name in TARGETS["core"].implementations() if name not in PACKED)
    cases: list[Case] = []
    for length in (KI << shift for shift in range(9)):
        kept = every if length in (KI, 4 * KI, 16 * KI, 64 * KI) else ("nsa", "sdpa-cudnn")
        cases += grid("core", kept, heads, (length,))
    return cases


def groups() -> list[Case]:
    """The core against cuDNN for G of 1, 4, 8 and 16, 1k to 256k tokens."""
    return grid("core", ("nsa", "sdpa-cudnn"), GROUPS, tuple(KI << shift for shift in range(9)))


def families() -> list[Case]:
    """The core against cuDNN at the heads of Llama 3.2 and Qwen2.5, 4k, 16k and 64k tokens."""
    return [
        case
        for length in (4 * KI, 16 * KI, 64 * KI)
        for heads, dim in FAMILIES
        for case in grid("core", ("nsa", "sdpa-cudnn"), (heads,), (length,), dims=((dim, dim),))
    ]


def shapes() -> list[Case]:
    """The core for G of 1, 4, 8 and 16 and three head dims, 64k tokens."""
    rivals = ("nsa", "sdpa-cudnn", "flex-dense")
    return [
        case
        for dim in DIMS
        for case in grid(
            "core", rivals if dim[0] != dim[1] else rivals[:2], GROUPS, (64 * KI,), dims=(dim,)
        )
    ]


def compression() -> list[Case]:
    """The four kinds of φ."""
    return [
        case
        for kind in get_args(CompressionKind)
        for case in grid(
            "compression",
            ("compiled", "eager"),
            MODEL_HEADS[:2],
            (8 * KI, 64 * KI),
            config=NSAConfig(compression=kind),
        )
    ]


def checkpoints() -> list[Case]:
    """Layers of NSA-1B, MiniCPM4 and MiniMax-M3 against cuDNN, 64k and 128k tokens."""
    names = ("nsa", "sdpa-cudnn")
    narrow, long = ((64, 64),), (128 * KI,)
    cases = grid("core", names, ((32, 2),), (64 * KI,), dims=narrow, config=NSA_1B)
    cases += grid("infllm-v2", names, ((32, 2), (32, 8)), (64 * KI, *long), config=INFLLM_V2)
    return cases + grid("minimax-m3", names, ((64, 4),), long, config=MINIMAX_M3)


def full() -> list[AnyCase]:
    """Everything that the docs show: the cases of all the others on CUDA, each once."""
    cases: list[AnyCase] = [*headline(), *sweep(), *groups(), *shapes(), *families()]
    cases += [*branches(), *eager(), *packed(), *layers(), *overlap(), *compression(), *models()]
    return [*cases, *checkpoints(), *compiling()]


def models() -> list[AnyCase]:
    """Training steps: 125M parameters at 512 to 2048 tokens, layers of Llama-3.1-8B from 2k.

    Also with the decoder as one graph, up to 16k tokens: SDPA's mask grows with their square.
    """
    sizes = [("125m", batch, length) for length in (2048, 1024, 512) for batch in (16, 1)]
    cases: list[AnyCase] = [
        ModelCase(model, name, batch, length)
        for model, batch, length in sizes
        for name in IMPLEMENTATIONS
    ]
    large = "llama-3.1-8b, 4 layers"
    for length in (KI << shift for shift in range(1, 7)):
        cases += [
            ModelCase(large, name, 1, length) for name in ("nsa", "dense", "transformers-sdpa")
        ]
    cases += [ModelCase(large, name, 1, 8 * KI) for name in ("nsa-eager", "dense-eager")]
    wholes = [("125m", 16, 2 * KI), *((large, 1, KI << shift) for shift in range(1, 5))]
    return cases + [
        ModelCase(model, name, batch, length) for model, batch, length in wholes for name in WHOLE
    ]


def compiling() -> list[AnyCase]:
    """Compilation of the core, cold and warm."""
    return [
        CompileCase(query_heads, kv_heads, 8 * KI, train)
        for query_heads, kv_heads in ((64, 4), (32, 8))
        for train in (False, True)
    ]


def smoke() -> list[AnyCase]:
    """What a CPU can run of each target, tiny and in seconds: for tests, not for times."""
    config = NSAConfig(8, 4, 8, num_selected_blocks=4, window_size=16, compression="mean")
    pooled = InfLLMV2Config(8, 4, 16, window_size=16, topk=3).selection
    indexed = replace(MINIMAX_M3, compress_stride=16, compress_block_size=16, select_block_size=16)

    def tiny(
        target: str,
        implementation: str,
        train: bool,
        pattern: Pattern = "random",
        config: NSAConfig = config,
    ) -> Case:
        sides = {"seq_len": 128, "query_heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 16}
        return Case(
            target, implementation, train, **sides, dtype="float32", pattern=pattern, config=config
        )

    return [
        tiny("core", "nsa", False),
        tiny("core", "nsa", True),
        tiny("core", "sdpa-math", True),
        tiny("core", "nsa-eager", True, "overlap"),
        *(tiny(branch, "dense", True) for branch in ("compressed", "selected", "sliding")),
        tiny("choice", "auto", False),
        tiny("merge", "auto", True),
        tiny("compression", "compiled", True),
        tiny("infllm-v2", "nsa", True, config=pooled),
        tiny("minimax-m3", "nsa-eager", True, config=replace(indexed, num_selected_blocks=3)),
        ModelCase("tiny", "nsa", 2, 64),
        ModelCase("tiny", "dense-eager", 2, 64),
        ModelCase("tiny", "transformers-sdpa-whole", 2, 64),
        *(LayerCase(name, 3, 40, 4, 2, 8, config) for name in LAYERS),
    ]


PRESETS: dict[str, Callable[[], Sequence[AnyCase]]] = {
    "smoke": smoke,
    "quick": quick,
    "headline": headline,
    "sweep": sweep,
    "groups": groups,
    "shapes": shapes,
    "families": families,
    "branches": branches,
    "eager": eager,
    "packed": packed,
    "layers": layers,
    "overlap": overlap,
    "trained": trained,
    "compression": compression,
    "checkpoints": checkpoints,
    "models": models,
    "compile": compiling,
    "full": full,
}


def preset(name: str) -> list[AnyCase]:
    """The cases of a preset, each once."""
    return list(dict.fromkeys(PRESETS[name]()))
