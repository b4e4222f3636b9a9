"""The decode kernels against the float64 oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from nsa_flex import decoding, nsa_attention
from nsa_flex.backends import decode as few_queries
from nsa_flex.backends.branch import Inputs
from nsa_flex.compression import Compression, what_is_read
from nsa_flex.config import BRANCHES, PRODUCTS, NSAConfig
from nsa_flex.dispatch import table
from nsa_flex.gates import GateLogits
from reference import oracle
from reference.accuracy import assert_close, eager_attention, to_float64
from reference.interpreter import DEVICE, INTERPRETED, LOW_PRECISION, interpreted, kernels
from reference.launches import SUBSETS, decode_kernels_of, launched
from reference.modes import no_synchronization
from reference.phi import by_definition

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.decode import config as decode_plan
from nsa_flex.fallback_kernels.decode import interface as decode
from nsa_flex.fallback_kernels.decode import launch as decode_launch
from nsa_flex.fallback_kernels.decode import operators
from nsa_flex.fallback_kernels.launch import plans

SMALL = NSAConfig(8, 4, 16, 4, window_size=20)
APART = NSAConfig(8, 8, 16, 4, window_size=7)  # compressed blocks do not overlap
DENSE = NSAConfig(16, 4, 16, 5, window_size=40)  # each token in four compressed blocks
ALIKE = NSAConfig(16, 16, 16, 4, window_size=1)  # l = d = l'
WIDE = NSAConfig(32, 16, 128, 4, window_size=33)  # several tiles of tokens a block
BARE = NSAConfig(8, 4, 16, 3, num_initial_blocks=0, num_local_blocks=1, window_size=20)
FORCED = NSAConfig(8, 4, 16, 4, num_initial_blocks=2, num_local_blocks=2, window_size=20)
TILED = NSAConfig(16, 16, 16, 4, 0, 1, window_size=20, selection="tiled_top_k")
ODD = NSAConfig(6, 3, 24, 4, window_size=20)  # no powers of two but l'/d

test_kernels_under_the_interpreter = interpreted(__file__)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other."""
    if INTERPRETED:
        monkeypatch.setattr(decode_plan, "TARGET_CTAS", 2)
        monkeypatch.setattr(decode_plan, "MAX_CTAS", 3)


@dataclass(frozen=True)
class Case:
    """Sizes of one call: `past` tokens of each row are stored, `tokens` are new."""

    config: NSAConfig = SMALL
    past: tuple[int, ...] = (150,)
    tokens: int = 1
    capacity: int = 170
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def num_compressed(self) -> int:
        return max(1, self.config.num_compressed_blocks(self.capacity))


class Problem:
    """Whole rows, and the cache as it is before the new tokens enter; the rest is NaN."""

    def __init__(self, case: Case) -> None:
        self.case = case
        batch, heads, config = len(case.past), case.kv_heads * case.group, case.config

        def normal(num_heads: int, tokens: int, width: int) -> Tensor:
            x = torch.randn(batch, num_heads, tokens, width)
            return x.to(DEVICE, case.dtype)

        self.query = normal(heads, case.tokens, case.head_dim)
        self.gates = torch.rand(batch, heads, case.tokens, len(config.branches))
        self.gates = self.gates.to(DEVICE, case.dtype)
        self.all_key = normal(case.kv_heads, case.capacity, case.head_dim)
        self.all_value = normal(case.kv_heads, case.capacity, case.value_dim)
        self.lengths = torch.tensor(case.past, dtype=torch.int32, device=DEVICE)
        shape = (batch, case.kv_heads, case.num_compressed)
        self.key, self.value = self.all_key.clone(), self.all_value.clone()
        self.compressed_key = self.key.new_full((*shape, case.head_dim), float("nan"))
        self.compressed_value = self.value.new_full((*shape, case.value_dim), float("nan"))
        for row, past in enumerate(case.past):
            blocks = config.num_compressed_blocks(past)
            for x, compressed in self.pairs():
                x[row, :, past:] = float("nan")
                mean = oracle.compress_mean(to_float64(x[row : row + 1, :, :past]), config)
                compressed[row, :, :blocks] = torch.from_numpy(mean)[0].to(DEVICE, case.dtype)
        new = [
            torch.stack(
                [x[row, :, past : past + case.tokens] for row, past in enumerate(case.past)]
            )
            for x in (self.all_key, self.all_value)
        ]
        self.new_key, self.new_value = new

    def pairs(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return (self.key, self.compressed_key), (self.value, self.compressed_value)

    @property
    def cache(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.key, self.value, self.compressed_key, self.compressed_value

    def store(self) -> None:
        """The new tokens, and the blocks that they complete, as the oracle has them."""
        config, count = self.case.config, self.case.tokens
        for row, past in enumerate(self.case.past):
            first, stop = (config.num_compressed_blocks(n) for n in (past, past + count))
            whole = (self.all_key, self.all_value)
            for (x, compressed), tokens in zip(self.pairs(), whole, strict=True):
                x[row, :, past : past + count] = tokens[row, :, past : past + count]
                here = to_float64(tokens[row : row + 1, :, : past + count])
                blocks = torch.from_numpy(oracle.compress_mean(here, config))
                compressed[row, :, first:stop] = blocks[0, :, first:stop].to(compressed)

    def attend(self, **options: Any) -> tuple[Tensor, decode.DecodeAux]:
        result = decode.decode_attention(
            self.query, *self.cache, self.gates, self.lengths,
            config=self.case.config, return_aux=True, **options,
        )  # fmt: skip
        assert isinstance(result, tuple)
        return result

    def step(self, **options: Any) -> tuple[Tensor, decode.DecodeAux]:
        result = decode.step(
            self.query, self.new_key, self.new_value, *self.cache, self.gates, self.lengths,
            config=self.case.config, return_aux=True, **options,
        )  # fmt: skip
        assert isinstance(result, tuple)
        return result


def check(
    problem: Problem,
    out: Tensor,
    aux: decode.DecodeAux,
    sliding: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Output, log-sum-exps and choice of every row against the oracle of that row alone."""
    case, config = problem.case, problem.case.config
    overlap = config.compress_block_size // config.compress_stride
    rounding = 32 * torch.finfo(torch.float32).eps * case.group * overlap
    wants, plains = [], []
    for row, past in enumerate(case.past):
        length = past + case.tokens
        blocks = config.num_compressed_blocks(length)
        one = slice(row, row + 1)
        tensors = [problem.query[one], problem.all_key[one, :, :length]]
        tensors += [problem.all_value[one, :, :length], problem.compressed_key[one, :, :blocks]]
        gates = oracle.every_gate(to_float64(problem.gates[one]), config.branches)
        tensors += [problem.compressed_value[one, :, :blocks], torch.tensor(gates).to(out)]
        chosen = aux.blocks[one].cpu().numpy() if config.has("selected") else None
        own = [None, None] if sliding is None else [x[one, :, :length] for x in sliding]
        arrays = {
            name: None if x is None else to_float64(x)
            for name, x in zip(("sliding_key", "sliding_value"), own, strict=True)
        }
        want = oracle.forward(*map(to_float64, tensors), config, blocks=chosen, **arrays)
        assert oracle.choice_excess(want.blocks, want.scores, config, past) <= rounding
        lse = np.stack([want.lse[name] for name in config.branches], -1)
        got_lse = to_float64(aux.lse[one])
        np.testing.assert_array_equal(np.isfinite(got_lse), np.isfinite(lse))
        finite = np.isfinite(lse)
        np.testing.assert_allclose(got_lse[finite], lse[finite], rtol=1e-5, atol=1e-5)
        wants.append(want.out)
        plains.append(eager_row(tensors, want.blocks, config, past, own))
    assert out.dtype == case.dtype
    assert_close("output", out, np.concatenate(wants), torch.cat(plains), case.dtype)


def eager_row(
    tensors: list[Tensor],
    blocks: np.ndarray,
    config: NSAConfig,
    past: int,
    sliding: list[Tensor | None],
) -> Tensor:
    """One row as one writes it in PyTorch, every step in the inputs' dtype."""
    q, k, v, ck, cv, gates = tensors
    sk, sv = (x if own is None else own for x, own in zip((k, v), sliding, strict=True))
    size = q.shape[2], k.shape[2]
    masks = (
        oracle.compressed_mask(*size, ck.shape[2], config, past),
        oracle.selected_mask(blocks, k.shape[2], config, past),
        oracle.sliding_mask(*size, config, past),
    )
    out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    for branch, (keys, values) in enumerate(((ck, cv), (k, v), (sk, sv))):
        if keys.shape[2]:
            mask = torch.from_numpy(masks[branch]).to(q.device)
            part = eager_attention(q, keys, values, mask, q.shape[3] ** -0.5)
            out = out + part * gates[..., branch, None]
    return out


def check_step(case: Case, **options: Any) -> None:
    problem = Problem(case)
    check(problem, *problem.step(**options))


@kernels
@pytest.mark.kept(lambda group: group in (1, 3, 16))
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 12, 16, 32])
def test_group_sizes(group: int) -> None:
    check_step(Case(group=group))


@kernels
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(8, 8), (32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)],
)
def test_head_dims(head_dim: int, value_dim: int) -> None:
    check_step(Case(head_dim=head_dim, value_dim=value_dim, dtype=LOW_PRECISION[-1]))


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISION])
def test_dtypes(dtype: torch.dtype) -> None:
    check_step(Case(dtype=dtype, past=(150,), kv_heads=2, head_dim=64, value_dim=32))


@kernels
@pytest.mark.parametrize("config", [APART, DENSE, ALIKE, WIDE, BARE, FORCED, ODD, TILED])
def test_configs(config: NSAConfig) -> None:
    past = (config.num_selected_blocks + 3) * config.select_block_size
    check_step(Case(config, (past + 3, 40), capacity=past + 9))


def choose_in_chunks(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """As where there are few rows and many blocks."""
    monkeypatch.setattr(decode_plan, "TARGET_CTAS", 264)
    monkeypatch.setattr(decode_plan, "MIN_CHUNK_BLOCKS", chunk)


@kernels
@pytest.mark.parametrize("chunks", [1, 2])
def test_tiles(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries in the first tile, at both ends of others, and in a tile of the second chunk."""
    choose_in_chunks(monkeypatch, 128 // chunks)
    config = NSAConfig(4, 4, 4, 8, 0, 1, window_size=9, selection="tiled_top_k")
    case = Case(config, (5, 31, 32, 36, 63, 255, 256, 300), capacity=330, group=1)
    problem = Problem(case)
    key, value, compressed_key, _ = problem.cache
    plan = decode_plan.DecodePlan.of(problem.query, key, value, compressed_key, config)
    assert plan.chunks == chunks
    check(problem, *problem.step())
    check_step(Case(config, (126, 30, 253), tokens=5, capacity=330, group=2))


@pytest.mark.parametrize(("kilobytes", "stages"), [(99, 1), (163, 2), (227, 3)])
def test_tiles_in_flight_fit_the_device(kilobytes: int, stages: int) -> None:
    """Of float32 keys and values of 256 numbers, 64 KiB a tile."""
    query = torch.empty(1, 4, 1, 256)
    plan = decode_plan.DecodePlan.of_sizes(query, 1, 256, 4096, 255, NSAConfig())
    assert replace(plan, shared_memory=kilobytes << 10).tuned().stages == stages


@kernels
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("config", [SMALL, BARE, DENSE])
def test_choice_in_chunks(config: NSAConfig, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of each chunk, ranked by those who read them, are the best of all."""
    choose_in_chunks(monkeypatch, chunk)
    problem = Problem(Case(config, (167, 40), group=3))
    key, value, compressed_key, _ = problem.cache
    plan = decode_plan.DecodePlan.of(problem.query, key, value, compressed_key, config)
    assert plan.chunks == 128 // chunk
    check(problem, *problem.step())


@kernels
@pytest.mark.parametrize(
    ("tokens", "past"), [(1, (0, 6, 7, 63, 64, 169)), (3, (5, 167)), (16, (9,))]
)
def test_rows_of_any_length(tokens: int, past: tuple[int, ...]) -> None:
    """Empty rows, rows without a compressed block, full ones: each as if it were alone."""
    check_step(Case(past=past, tokens=tokens, group=1))


@kernels
def test_many_slots() -> None:
    config = NSAConfig(4, 4, 4, 64, num_initial_blocks=3, num_local_blocks=5, window_size=9)
    check_step(Case(config, past=(280,), capacity=290, group=1))


@kernels
@pytest.mark.parametrize("programs", [1, 7, 1000])
def test_any_number_of_parts(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split a tile of keys, and all tiles by one; the same bits whenever it is run again."""
    monkeypatch.setattr(decode_plan, "TARGET_CTAS", programs)
    config = NSAConfig(4, 2, 8, 6, window_size=40)
    problem = Problem(Case(config, past=(690, 3), capacity=700, group=1))
    out, aux = problem.step()
    check(problem, out, aux)
    again, aux_again = problem.step()
    assert torch.equal(out, again)
    assert torch.equal(aux.blocks, aux_again.blocks)
    assert torch.equal(aux.lse, aux_again.lse)


@kernels
@pytest.mark.parametrize("tokens", [1, 2])
def test_the_step_is_its_parts(tokens: int) -> None:
    """What it stores is what attention alone finds, to the bit."""
    problem = Problem(Case(past=(150, 31), tokens=tokens))
    out, aux = problem.step()
    before = [x.clone() for x in problem.cache]
    attended, attended_aux = problem.attend()
    assert torch.equal(out, attended)
    assert torch.equal(aux.blocks, attended_aux.blocks)
    for x, old in zip(problem.cache, before, strict=True):
        torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)


@kernels
@pytest.mark.parametrize(("tokens", "past"), [(1, (150, 150)), (3, (5, 167)), (16, (150, 150))])
def test_few_queries_against_a_longer_past(tokens: int, past: tuple[int, ...]) -> None:
    """As `nsa_attention` runs them: offsets of the host or of the device, keys of any strides."""
    problem = Problem(Case(past=past, tokens=tokens))
    problem.store()
    key, value, *compressed = problem.cache
    key = key.mT.contiguous().mT
    inputs = Inputs(problem.query, key, value, *compressed, key, value, problem.gates)
    offset = past[0] if len(set(past)) == 1 else problem.lengths.long()
    out, aux = few_queries.attend(inputs, SMALL, 0.25, offset, return_aux=True)
    assert aux is not None
    check(problem, out, aux)
    again, _ = few_queries.attend(inputs, SMALL, 0.25, offset, return_aux=False)
    assert torch.equal(again, out)


@kernels
@pytest.mark.kept(lambda branches, tokens: tokens == 7 or branches == ("selected",))
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_few_queries_of_some_branches(
    branches: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call without what no branch reads runs the kernels of a decode step."""
    monkeypatch.setattr(table, "decode_unsupported_reason", lambda facts: facts.decode_problem)
    config = replace(SMALL, branches=branches)
    problem = Problem(Case(config, past=(150, 150), tokens=tokens, kv_heads=2))
    problem.store()
    key, value, *compressed = (x.nan_to_num() for x in problem.cache)
    with launched() as names, torch.no_grad():
        out, aux = nsa_attention(
            *(problem.query, key, value, *what_is_read(config, *compressed), problem.gates),
            config=config,
            query_offset=150,
            return_aux=True,
        )
    assert names == decode_kernels_of(branches, stores=False)
    assert [name for name, x in aux.lse._asdict().items() if x is not None] == list(branches)
    assert (aux.blocks is None) == ("selected" not in branches)
    problem.compressed_key, problem.compressed_value = compressed
    lse = torch.stack([x for x in aux.lse if x is not None], -1)
    check(problem, out, decode.DecodeAux(aux.blocks, lse))


@kernels
@pytest.mark.parametrize(("tokens", "kind"), [(1, "mean"), (3, "mean"), (1, "mlp"), (3, "linear")])
def test_writes_its_slots_and_no_other(tokens: int, kind: Any) -> None:
    """The last rows have room for fewer tokens than come, or for none."""
    starts = (0, 7, 169 - tokens // 2)
    room = tuple(min(start, 169 - tokens) for start in starts)
    problem = Problem(Case(past=room, tokens=tokens, capacity=169, group=1))
    problem.lengths = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    before = [x.clone() for x in problem.cache]
    maps = random_phi(kind, SMALL, 1, (16, 16), torch.float32)
    out, _ = problem.step(phi=phi_of(*maps))
    fits = [min(tokens, 169 - start) for start in starts]
    for x, old, new in zip(problem.cache[:2], before[:2],
                           (problem.new_key, problem.new_value), strict=True):  # fmt: skip
        for row, (start, count) in enumerate(zip(starts, fits, strict=True)):
            assert torch.equal(x[row, :, start : start + count], new[row, :, :count])
            old[row, :, start : start + count] = new[row, :, :count]
        torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)
    for x, old in zip(problem.cache[2:], before[2:], strict=True):
        for row, (start, count) in enumerate(zip(starts, fits, strict=True)):
            first, stop = (SMALL.num_compressed_blocks(n) for n in (start, start + count))
            old[row, :, first:stop] = x[row, :, first:stop]
        torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)
    assert not out[2, :, fits[2] :].any(), "no output for a token that has no slot"


def phi_of(key: Compression, value: Compression) -> decode.Phi:
    """Parameters as the kernels take them."""
    return decode.Phi(key.kind, tuple(key.parameters()), tuple(value.parameters()))


def random_phi(
    kind: Any, config: NSAConfig, heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> list[Compression]:
    """φ of keys and of values, every parameter off its start."""
    maps = [Compression(config, heads, dim, kind).requires_grad_(False) for dim in dims]
    for parameter in (x for each in maps for x in each.parameters()):
        parameter += 0.3 * torch.randn_like(parameter) * parameter[0].numel() ** -0.5
    return [each.to(DEVICE, dtype) for each in maps]


def check_blocks(
    maps: list[Compression], tokens: list[Tensor], compressed: list[Tensor], past: int
) -> None:
    """Compressed rows of `past` tokens a row against φ by its formulas; the rest is as it was."""
    number = maps[0].config.num_compressed_blocks(past)
    for phi, x, found in zip(maps, tokens, compressed, strict=True):
        assert found[:, :, number:].isnan().all()
        if number:
            exact = by_definition(phi, x[:, :, :past].cpu())
            eager = phi(x[:, :, :past])[:, :, :number]
            assert_close("compressed", found[:, :, :number], exact, eager, x.dtype)


EACH_KIND_ONCE = [("mean", 1), ("weighted", 3), ("linear", 3), ("mlp", 1)]


@kernels
@pytest.mark.kept(
    lambda kind, config, num_sets: (
        (kind, num_sets) in EACH_KIND_ONCE and (kind, config) != ("mlp", DENSE)
    )
)
@pytest.mark.parametrize(
    ("kind", "config", "num_sets"),
    [
        ("mean", SMALL, 1),
        ("weighted", DENSE, 1),
        ("weighted", SMALL, 3),
        ("linear", ODD, 1),
        ("linear", DENSE, 3),
        ("mlp", DENSE, 1),
        ("mlp", SMALL, 3),
        ("mlp", ODD, 1),
    ],
)
def test_emits_each_block_when_it_completes(kind: Any, config: NSAConfig, num_sets: int) -> None:
    """Chunks of any size, from the first token on; then every row is there, and right."""
    case = Case(config, past=(0,), capacity=32, kv_heads=2, value_dim=24)
    problem = Problem(case)
    maps = random_phi(kind, config, 2, (16, 24), torch.float32)
    whole = [torch.randn(1, 2 * num_sets, 32, dim, device=DEVICE) for dim in (16, 24)]
    raw = [torch.full_like(x, float("nan")) for x in whole]
    compressed = [problem.compressed_key, problem.compressed_value]
    stored = 0
    for tokens in (7, 1, 1, 9, 1, 1, 1, 1, 10):
        new = [x[:, :, stored : stored + tokens] for x in whole]
        query = torch.randn(1, 2, tokens, 16, device=DEVICE)
        gates = torch.rand(1, 2, tokens, 3, device=DEVICE)
        lengths = torch.full((1,), stored, dtype=torch.int32, device=DEVICE)
        count = [config.num_compressed_blocks(n) for n in (stored, stored + tokens)]
        out = decode.step(
            query, *new, *raw, *compressed, gates, lengths,
            config=config, phi=phi_of(*maps), num_sets=num_sets, may_complete=count[0] < count[1],
        )  # fmt: skip
        assert out.isfinite().all()
        stored += tokens
        for x, want in zip(raw, whole, strict=True):
            assert torch.equal(x[:, :, :stored], want[:, :, :stored])
            assert x[:, :, stored:].isnan().all()
        own = [x[:, :2, :stored] for x in whole]
        check_blocks(maps, own, compressed, stored)


@kernels
@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize(
    ("kind", "dims", "parameters"),
    [("mlp", (48, 32), None), ("linear", (24, 80), None), ("mlp", (16, 16), torch.float32)],
)
def test_matrices_of_half_precision(
    kind: Any, dims: tuple[int, int], parameters: torch.dtype | None, dtype: torch.dtype
) -> None:
    """Rows of which some complete a block and some none."""
    past = (150, 151, 7, 0, 166)
    case = Case(SMALL, past, 4, 170, 2, 1, *dims, dtype)
    problem = Problem(case)
    maps = random_phi(kind, SMALL, 2, dims, dtype if parameters is None else parameters)
    before = [x.clone() for x in problem.cache[2:]]
    problem.step(phi=phi_of(*maps))
    for row, start in enumerate(past):
        first, stop = (SMALL.num_compressed_blocks(n) for n in (start, min(start + 4, 170)))
        for phi, x, old, found in zip(
            maps, problem.cache[:2], before, problem.cache[2:], strict=True
        ):
            here = slice(first, stop)
            torch.testing.assert_close(found[row, :, :first], old[row, :, :first], rtol=0, atol=0)
            assert found[row, :, stop:].isnan().all()
            if first == stop:
                continue
            tokens = x[row : row + 1, :, : min(start + 4, 170)]
            exact = by_definition(phi, tokens.cpu())
            eager = phi(tokens)[0, :, here]
            assert_close("compressed", found[row, :, here], exact[0, :, here], eager, dtype)


@kernels
def test_the_mlp_starts_as_exactly_the_mean() -> None:
    tensors = []
    for kind in ("mean", "mlp"):
        torch.manual_seed(1)
        problem = Problem(Case(past=(151,), kv_heads=2, dtype=LOW_PRECISION[0]))
        maps = [Compression(SMALL, 2, 16, kind).to(DEVICE, LOW_PRECISION[0]) for _ in range(2)]
        problem.step(phi=phi_of(*maps))
        tensors.append(problem.compressed_key[:, :, : SMALL.num_compressed_blocks(152)])
    torch.testing.assert_close(*tensors, rtol=0, atol=0)


@kernels
def test_told_that_none_completes_it_compresses_none() -> None:
    """And saves the launches; the caller knows the lengths."""
    problem = Problem(Case(past=(151,)))
    maps = random_phi("mlp", SMALL, 1, (16, 16), torch.float32)
    before = problem.compressed_key.clone()
    problem.step(phi=phi_of(*maps), may_complete=False)
    torch.testing.assert_close(problem.compressed_key, before, rtol=0, atol=0, equal_nan=True)
    problem.step(phi=phi_of(*maps))
    assert problem.compressed_key[:, :, 36].isfinite().all()


@kernels
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_products_that_nobody_computes_need_no_parameters(kind: Any) -> None:
    problem = Problem(Case(past=(149,)))
    maps = random_phi(kind, SMALL, 1, (16, 16), torch.float32)
    expected, _ = problem.step(phi=phi_of(*maps), may_complete=False)
    found, _ = problem.step(phi=decode.Phi(kind), may_complete=False)
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=rf"φ of key has parameters \(\); {kind} has"):
        problem.step(phi=decode.Phi(kind))
    with pytest.raises(ValueError, match=rf"φ of value has parameters \(\); {kind} has"):
        problem.step(phi=decode.Phi(kind, phi_of(*maps).key), may_complete=False)
    with pytest.raises(ValueError, match=r"φ of key has parameters \(\); weighted has"):
        problem.step(phi=decode.Phi("weighted"), may_complete=False)


@kernels
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISION])
def test_gates_from_logits(dtype: torch.dtype, has_bias: bool) -> None:
    """Those of the caller, in float64 and rounded to his dtype.

    The result is a sum of branches that partly cancel, so an error counts against its norm.
    """
    case = Case(past=(150, 9), kv_heads=2, tokens=2, dtype=dtype)
    problem = Problem(case)
    problem.store()
    offset = torch.tensor([-0.5, 0.5, 0.25]).to(DEVICE, dtype)
    logits = torch.randn_like(problem.gates).transpose(1, 2).contiguous().transpose(1, 2)
    bias = torch.randn(3 * logits.shape[1]).to(DEVICE, dtype) if has_bias else None
    problem.gates = logits
    out, aux = problem.attend(gate_offset=offset, gate_bias=bias)
    exact = GateLogits(logits.double(), offset, bias).gates()
    problem.gates = exact.to(dtype)
    check(problem, out, aux)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISION])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float16])
def test_a_bias_is_added_in_float32(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    """To the bit as if logits with it had come in float32; rows and tokens have the same."""
    problem = Problem(Case(past=(150, 9), kv_heads=2, tokens=2, dtype=dtype))
    problem.store()
    offset = torch.tensor([-0.5, 0.5, 0.25]).to(DEVICE, bias_dtype)
    bias = torch.randn(3 * problem.query.shape[1]).to(DEVICE, bias_dtype)
    problem.gates = torch.randn_like(problem.gates).to(dtype).float()
    found, _ = problem.attend(gate_offset=offset, gate_bias=bias)
    problem.gates = problem.gates + bias.float().view(-1, 1, 3)
    expected, _ = problem.attend(gate_offset=offset)
    assert torch.equal(found, expected)


@kernels
@pytest.mark.parametrize("kind", ["mean", "mlp"])
def test_token_by_token_from_nothing(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache that the steps build is the cache that the next steps read; one plan for all."""
    monkeypatch.setattr(plans, "DEVICES", {"cuda", "cpu"})
    config = NSAConfig(4, 2, 4, 3, window_size=6)
    case = Case(config, past=(0,), capacity=14, group=1)
    problem = Problem(case)
    maps = random_phi(kind, config, 1, (16, 16), torch.float32)
    kept = operators.step._init_fn.plans  # type: ignore[attr-defined]
    recorded, replayed = kept.recorded, kept.replayed
    for position in range(14):
        here = slice(position, position + 1)
        problem.query = torch.randn_like(problem.query)
        problem.new_key, problem.new_value = (
            x[:, :, here].contiguous() for x in (problem.all_key, problem.all_value)
        )
        problem.lengths.fill_(position)
        problem.case = replace(case, past=(position,))
        check(problem, *problem.step(phi=phi_of(*maps)))
    compressed = [problem.compressed_key, problem.compressed_value]
    check_blocks(maps, [problem.all_key, problem.all_value], compressed, 14)
    assert (kept.recorded - recorded, kept.replayed - replayed) == (1, 12)
    assert not kept.problems


@kernels
@pytest.mark.kept(lambda gating, new_memory: (gating == "gates") == (new_memory == "as it is"))
@pytest.mark.parametrize(
    ("kind", "gating"),
    [("mean", "gates"), ("mlp", "gates"), ("mean", "logits"), ("mean", "bias apart")],
)
def test_steps_by_recent_plans(
    kind: Any, gating: str, new_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They store and attend as the operator does, with the parameters that φ has by then."""

    def is_plain(x: Tensor) -> bool:  # also on the CPU
        return not torch.compiler.is_compiling()

    monkeypatch.setattr(plans, "DEVICES", {"cuda", "cpu"})
    for module in (decode, decoding):
        monkeypatch.setattr(module, "is_plain", is_plain)
    monkeypatch.setattr(decoding, "unsupported_reason", decode.unsupported_reason)
    config = NSAConfig(4, 2, 4, 3, window_size=6)
    problem = Problem(Case(config, past=(0,), capacity=14, group=1))
    maps = random_phi(kind, config, 1, (16, 16), torch.float32)
    offset, bias = torch.rand(3, device=DEVICE), torch.rand(3, device=DEVICE)
    gates: Any = problem.gates
    options: dict[str, Any] = {}
    if gating != "gates":
        options["gate_offset"] = offset
        options["gate_bias"] = bias if gating == "bias apart" else None
        gates = GateLogits(problem.gates, *options.values())
    kept = operators.output.plans  # type: ignore[attr-defined]
    replayed, ran = kept.replayed, decode.step
    steps = []
    monkeypatch.setattr(decode, "step", lambda *a, **o: steps.append(1) or ran(*a, **o))
    for position in range(14):
        if position == 9:
            maps = random_phi(kind, config, 1, (16, 16), torch.float32)
        here = slice(position, position + 1)
        query = torch.randn_like(problem.query)
        new = [x[:, :, here].contiguous() for x in (problem.all_key, problem.all_value)]
        problem.lengths.fill_(position)
        twins = [x.clone() for x in problem.cache]
        with torch.no_grad():
            out, aux = decoding.decode_step(
                query,
                decoding.New(*new, maps),
                decoding.Stored(*problem.cache, problem.lengths),
                gates,
                config=config,
                scale=0.25,
            )
            options |= {"config": config, "scale": 0.25, "phi": phi_of(*maps)}
            expected, _ = ran(
                *(query, *new, *twins, problem.gates, problem.lengths), **options, return_aux=True
            )
        assert aux is None
        assert torch.equal(out, expected)
        for x, twin in zip(problem.cache, twins, strict=True):
            torch.testing.assert_close(x, twin, rtol=0, atol=0, equal_nan=True)
    assert kept.replayed - replayed == 12
    assert len(steps) == 3  # one to see, one to record, one to know it again
    assert not kept.problems
    with torch.no_grad(), pytest.raises(ValueError, match="gates has shape"):
        decoding.decode_step(
            query,
            decoding.New(*new, maps),
            decoding.Stored(*problem.cache, problem.lengths),
            problem.gates[..., :2],
            config=config,
            scale=0.25,
        )


@kernels
@pytest.mark.parametrize("branches", [*SUBSETS, BRANCHES], ids="+".join)
def test_absent_branches_run_no_kernels(branches: Any) -> None:
    """And read nothing: values that nobody needs are NaN, and rows count as the branches' own."""
    config = replace(SMALL, branches=branches)
    problem = Problem(Case(config, past=(150, 3, 60), kv_heads=2))
    if "compressed" not in branches:
        problem.compressed_value.fill_(float("nan"))
    if branches == ("sliding",):
        problem.compressed_key.fill_(float("nan"))
    before = [x.clone() for x in problem.cache[2:]]
    with launched() as names:
        out, aux = problem.step()
    assert names == decode_kernels_of(branches, stores=True)
    if branches == ("sliding",):  # no block is compressed
        for x, old in zip(problem.cache[2:], before, strict=True):
            torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)
    problem.store()
    for x in problem.cache[2:]:
        x.nan_to_num_()  # the oracle multiplies what is absent by 0
    check(problem, out, aux)
    assert aux.lse.shape[-1] == len(branches)
    assert aux.blocks.shape[-1] == (config.num_selected_blocks if "selected" in branches else 0)
    rows = decode.count_rows(
        problem.query, *problem.cache, problem.gates, problem.lengths, config=config
    )
    reads = (config.compresses, "selected" in branches, "sliding" in branches)
    assert rows[0].sum((0, 1)).bool().tolist() == list(reads)


@kernels
@pytest.mark.kept(lambda kind, num_sets: (kind, num_sets) in (("mean", 1), ("linear", 3)))
@pytest.mark.parametrize("num_sets", [1, 3])
@pytest.mark.parametrize(
    ("kind", "tokens"), [("mean", 1), ("weighted", 5), ("linear", 1), ("mlp", 5)]
)
def test_values_that_no_branch_reads_take_one_row(
    kind: Any, tokens: int, num_sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys alone are compressed, or nothing; beside that row nothing is written. By a plan too."""
    monkeypatch.setattr(plans, "DEVICES", {"cuda", "cpu"})
    kept = operators.step._init_fn.plans
    for branches in [x for x in SUBSETS if "compressed" not in x]:
        config = replace(SMALL, branches=branches)
        problem = Problem(Case(config, past=(150, 27), tokens=tokens, kv_heads=2))
        for name in ("key", "value", "new_key", "new_value"):
            setattr(problem, name, torch.cat([getattr(problem, name)] * num_sets, 1))
        maps = random_phi(kind, config, 2, (16, 16), torch.float32)
        options: dict[str, Any] = {"phi": phi_of(*maps), "num_sets": num_sets}
        twin = copy.deepcopy(problem)
        rows = torch.full((2, 2, 3, 16), float("nan"), device=DEVICE)
        problem.compressed_value = rows[:, :, 1:2]
        if branches == ("sliding",):
            problem.compressed_key = problem.compressed_key[:, :, :0]
        with plans.without_plans():
            want, want_aux = twin.step(**options)
        replayed = kept.replayed
        for _ in range(3):
            out, aux = problem.step(**options)
        assert kept.replayed == replayed + 1, kept.problems
        assert torch.equal(out, want)
        assert torch.equal(aux.lse, want_aux.lse)
        if branches != ("sliding",):
            keys = (problem.compressed_key, twin.compressed_key)
            torch.testing.assert_close(*keys, rtol=0, atol=0, equal_nan=True)
            assert keys[0][:, :, 36 if tokens == 5 else 35].isfinite().any()
        assert rows[:, :, ::2].isnan().all()
        if kind in PRODUCTS or branches == ("sliding",):  # kernels that leave values out
            assert rows.isnan().all()


@kernels
def test_one_row_of_compressed_values_is_refused_where_they_are_read() -> None:
    problem = Problem(Case())
    problem.compressed_value = problem.compressed_value[:, :, :1]
    with pytest.raises(ValueError, match=r"compressed_value has shape \(1, 1, 1, 16\); expected"):
        problem.step()


@kernels
@pytest.mark.parametrize("branches", [*SUBSETS[:2], BRANCHES[:2], BRANCHES], ids="+".join)
def test_compressed_keys_give_what_is_read(branches: Any) -> None:
    """Scores for a selection, outputs for a compressed branch; what is not written is NaN."""
    problem = Problem(Case(replace(SMALL, branches=branches)))
    problem.store()
    tensors = (problem.query, *problem.cache[:3], problem.case.config)
    plan = decode_plan.DecodePlan.of(*tensors)
    workspace = plan.workspace(problem.query.device)
    cache = decode_launch.Cache(*problem.cache, problem.lengths)
    values = decode_launch.step_values(plan, problem.query, cache, workspace, 0.25)
    decode_launch.launch_compressed(plan, cache, values)
    assert workspace.row_sum[..., : plan.compressed_splits].isfinite().any()
    assert workspace.partial.isfinite().any() == ("compressed" in branches)
    assert workspace.score.isfinite().any() == ("selected" in branches)


@kernels
@pytest.mark.kept(lambda branches, num_sets: (num_sets == 3) == ("sliding" in branches))
@pytest.mark.parametrize("num_sets", [1, 3])
@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_gates_of_the_branches_there_are(
    branches: Any, num_sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As logits, with a bias of their own; several tokens; and a replay gives the same bits."""
    monkeypatch.setattr(plans, "DEVICES", {"cuda", "cpu"})
    config = replace(TILED, branches=branches)
    problem = Problem(Case(config, past=(150, 31), tokens=2))
    problem.store()
    problem.key, problem.value = (
        torch.cat([x] * num_sets, 1) for x in (problem.key, problem.value)
    )
    offset, bias = (torch.rand(heads * len(branches), device=DEVICE) for heads in (1, 2))
    problem.gates = torch.randn_like(problem.gates)
    kept = operators.step._init_fn.plans
    replayed = kept.replayed
    for _ in range(3):
        out, aux = problem.attend(gate_offset=offset, gate_bias=bias, num_sets=num_sets)
    assert kept.replayed == replayed + 1, kept.problems
    with plans.without_plans():
        again, _ = problem.attend(gate_offset=offset, gate_bias=bias, num_sets=num_sets)
    assert torch.equal(out, again)
    problem.gates = GateLogits(problem.gates.double(), offset, bias).gates().float()
    for x in problem.cache[2:]:
        x.nan_to_num_()
    check(problem, out, aux)


@pytest.mark.gpu
@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_the_kernels_run_a_step_of_some_branches(
    branches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured, so that kernels launched early overlap; aux has what is there."""
    config = replace(NSA_1B, branches=branches)
    problem = Problem(Case(config, (4999, 0, 300), 1, 5003, 2, 16, 64, 64, BF16))
    rows = problem.compressed_value
    if "compressed" not in branches:
        rows = rows[:, :, :1].clone()
    stored = decoding.Stored(*problem.cache[:3], rows, problem.lengths)
    phi = random_phi("mean", config, 2, (64, 64), BF16)
    new = decoding.New(problem.new_key, problem.new_value, (phi[0], phi[1]))
    monkeypatch.setattr(decoding, "step_by_operations", None)

    def step(return_aux: bool) -> tuple[Tensor, Any]:
        options = {"config": config, "scale": 0.125, "return_aux": return_aux}
        return decoding.decode_step(problem.query, new, stored, problem.gates, **options)

    with torch.no_grad():
        _, aux = step(True)  # compiles; what it stores is stored again
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, _ = step(False)
        for _ in range(20):
            problem.query.copy_(torch.randn_like(problem.query))
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured, step(False)[0])
    assert [name for name, x in aux.lse._asdict().items() if x is not None] == list(branches)
    assert (aux.blocks is None) == ("selected" not in branches)
    problem.store()
    for x in problem.cache[2:]:
        x.nan_to_num_()
    check(problem, *problem.attend())


@kernels
def test_steps_without_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies give the bits that replays give."""
    monkeypatch.setattr(plans, "DEVICES", {"cuda", "cpu"})
    problem = Problem(Case(past=(150, 31)))
    problem.store()

    def run() -> tuple[Tensor, Tensor]:
        out, aux = problem.attend()
        return out, aux.blocks

    kept = operators.step._init_fn.plans
    for _ in range(2):
        run()
    before = kept.replayed
    expected = run()
    assert kept.replayed == before + 1, kept.problems
    with plans.without_plans():
        found = run()
    assert kept.replayed == before + 1
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@kernels
def test_separate_keys_of_each_branch() -> None:
    problem = Problem(Case(past=(150, 9), kv_heads=2))
    problem.store()
    compressed = torch.full_like(problem.key, float("nan"))  # attention reads no raw ones
    sliding = torch.randn_like(problem.all_key), torch.randn_like(problem.all_value)
    key, value = problem.key, problem.value
    problem.key = torch.cat((compressed, key, sliding[0]), 1)
    problem.value = torch.cat((compressed, value, sliding[1]), 1)
    out, aux = problem.attend(num_sets=3)
    problem.key, problem.value = key, value
    check(problem, out, aux, sliding)


@kernels
@pytest.mark.parametrize("chunk", [128, 64])
def test_equal_scores_take_the_lower_index(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tile, where what is equal in exact arithmetic is equal in float32 too."""
    choose_in_chunks(monkeypatch, chunk)
    problem = Problem(Case(past=(150,), group=3))
    problem.store()
    problem.compressed_key.zero_()
    _, aux = problem.attend()
    assert aux.blocks.flatten().tolist() == [0, 1, 8, 9]


@kernels
@pytest.mark.parametrize("chunk", [128, 64])
def test_nan_scores_leave_the_forced_blocks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_in_chunks(monkeypatch, chunk)
    problem = Problem(Case(past=(160,)))
    problem.store()
    problem.compressed_key[:, :, 20] = float("nan")
    _, aux = problem.attend()
    assert {0, 9, 10} <= set(aux.blocks.flatten().tolist())
    assert aux.blocks.unique().numel() == 4


@kernels
@pytest.mark.parametrize("layout", ["tokens first", "slice of a longer cache", "strided inputs"])
def test_strides(layout: str) -> None:
    case = Case(past=(150,), kv_heads=2)
    problem = Problem(case)
    names = ("key", "value", "compressed_key", "compressed_value")
    if layout == "strided inputs":
        names = ("query", "gates", "new_key", "new_value")
        for name in names:
            x = getattr(problem, name)
            setattr(problem, name, x.transpose(1, 3).contiguous().transpose(1, 3))
    for name in names[: 4 * (layout != "strided inputs")]:
        x = getattr(problem, name)
        if layout == "tokens first":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        else:
            longer = torch.full((*x.shape[:2], 2 * x.shape[2], x.shape[3]), float("nan"))
            longer = longer.to(DEVICE, x.dtype)
            longer[:, :, : x.shape[2]] = x
            x = longer[:, :, : x.shape[2]]
        setattr(problem, name, x)
    check(problem, *problem.step())


@kernels
def test_rows_loaded_are_those_that_must_be() -> None:
    """N_cmp + selected tokens + min(w, t + 1) rows of keys a KV head, as the kernels count."""
    case = Case(past=(150, 6), kv_heads=2)
    problem = Problem(case)
    problem.store()
    _, aux = problem.attend()
    counted = decode.count_rows(
        problem.query, *problem.cache, problem.gates, problem.lengths, config=SMALL
    )
    for row, past in enumerate(case.past):
        for token in range(case.tokens):
            t = past + token
            for head in range(case.kv_heads):
                blocks = [j for j in aux.blocks[row, head, token].tolist() if j >= 0]
                selected = sum(min(16, t + 1 - 16 * j) for j in blocks)
                want = [SMALL.num_compressed_blocks(t + 1), selected, min(20, t + 1)]
                assert counted[row, head, token].tolist() == want


@kernels
def test_operators_obey_the_library_rules() -> None:
    problem = Problem(Case(past=(40,), capacity=50))
    problem.store()
    new = (problem.new_key, problem.new_value)
    # Comparisons of copies take NaN for a change.
    cache = [x.nan_to_num_(0.0) for x in problem.cache]
    maps = random_phi("mlp", SMALL, 1, (16, 16), torch.float32)
    phi = [x for each in maps for x in each.parameters()]
    rest = (problem.gates, None, None, problem.lengths)
    offset, bias = (torch.rand(size, device=DEVICE) for size in (3, 3 * problem.query.shape[1]))
    logits = (problem.gates, offset, bias, problem.lengths)
    calls: list[tuple[Any, ...]] = [
        (problem.query, *new, *cache, *logits, [], "mean", True, 1, 0.25, SMALL.counts),
        (problem.query, None, None, *cache, *rest, [], "mean", True, 1, 0.25, SMALL.counts),
        (problem.query, *new, *cache, *rest, [], "mean", True, 1, 0.25, SMALL.counts),
        (problem.query, *new, *cache, *rest, phi, "mlp", True, 1, 0.25, SMALL.counts),
    ]
    for branches in ("selected", "sliding"):  # results of other shapes
        counts = replace(SMALL, branches=(branches,)).counts
        few = (problem.gates[..., :1], None, None, problem.lengths)
        key, value = (x[:, :, :1].clone() for x in cache[2:])
        read = (cache[2], value) if branches == "selected" else (key[:, :, :0], value[:, :, :0])
        for used in (cache, (*cache[:2], *read)):
            calls.append((problem.query, *new, *used, *few, [], "mean", True, 1, 0.25, counts))
    for arguments in calls:
        torch.library.opcheck(operators.step, arguments)


@kernels
def test_compiles_into_one_graph_for_all_lengths() -> None:
    problem = Problem(Case(past=(20,), capacity=40))

    def token(query: Tensor, new_key: Tensor, new_value: Tensor, lengths: Tensor) -> Tensor:
        cache = (query, new_key, new_value, *problem.cache, problem.gates, lengths)
        out = decode.step(*cache, config=SMALL)
        lengths += 1
        return out  # type: ignore[return-value]

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(token, fullgraph=True, backend=counter)
    inputs = problem.query, problem.new_key, problem.new_value, problem.lengths
    for _ in range(2):
        before = problem.lengths.clone()
        out = compiled(*inputs)
        assert torch.equal(problem.lengths, before + 1)
        assert torch.equal(out, token(*inputs[:3], before))
    assert counter.frame_count == 1


def shorter(x: Tensor) -> Tensor:
    return x[:, :, 1:]


REFUSED: list[tuple[str, Callable[[Tensor], Any], str]] = [
    ("query", lambda x: x.double(), "query is torch.float64 on .*; key is torch.float32"),
    ("query", lambda x: x[:, :, :, :8], r"query has shape .*; expected \(1, Hq, T, 16\)"),
    ("query", lambda x: x.repeat(1, 1, 2, 1), r"gates has shape .* expected \(1, 2, 2, 3\)"),
    ("query", lambda x: x[:, :0], "query has shape .* expected at least one head"),
    (
        "new_key",
        lambda x: x.repeat(1, 1, 17, 1),
        r"new_value has shape .* expected \(1, 1, 17, 16",
    ),
    ("new_value", lambda x: x[:, :, :, 1:], "new_value has shape .*; expected"),
    ("new_key", lambda x: x.long(), "new_key is torch.int64"),
    ("value", shorter, "value has shape .*; expected"),
    ("key", lambda x: x.mT.contiguous().mT, "key has stride .* in its last dimension, not 1"),
    ("compressed_value", shorter, "compressed_value has shape .*; expected"),
    ("lengths", lambda x: x.long(), r"lengths must be torch.int32 \(1,\), got torch.int64"),
    ("lengths", lambda x: x.repeat(2), r"lengths must be torch.int32 \(1,\), got .*\(2,\)"),
    ("gates", lambda x: x[..., :2], "gates has shape .*; expected"),
]


@kernels
@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_refused(name: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    """A clear error, and the cache as it was."""
    problem = Problem(Case())
    cache, before = problem.cache, [x.clone() for x in problem.cache]
    setattr(problem, name, change(getattr(problem, name)))
    with pytest.raises(ValueError, match=message):
        problem.step()
    for x, old in zip(cache, before, strict=True):
        torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)


ELSEWHERE = [
    (name, lambda x: x.to("meta"), "(on|got) meta")
    for name in ("new_key", "gates", "lengths", "value")
]


@kernels
@pytest.mark.parametrize(("name", "change", "message"), REFUSED + ELSEWHERE)
def test_refused_once_a_plan_is_kept(
    name: str,
    change: Callable[[Tensor], Tensor],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay checks nothing: no call may find a plan that is not its own."""
    monkeypatch.setattr(plans, "DEVICES", {"cuda", "cpu"})
    plans.forget_plans()
    problem = Problem(Case())
    kept = operators.step._init_fn.plans
    before = kept.replayed
    for _ in range(3):
        problem.step()
    assert kept.replayed == before + 1
    setattr(problem, name, change(getattr(problem, name)))
    with pytest.raises(ValueError, match=message):
        problem.step()
    plans.forget_plans()


@kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 65}, "65 query heads share a KV head; the decode kernels take at most 64"),
        ({"head_dim": 512}, "512 is the largest head dim; the decode kernels take at most 256"),
        ({"config": NSAConfig(4, 4, 4, 65)}, "65 selected blocks"),
        ({"config": NSAConfig(4, 4, 4, selection="max_pool")}, "selection is 'max_pool'"),
        ({"config": NSAConfig(4, 4, 12, 4)}, "select_block_size / compress_stride is 3"),
        ({"tokens": 17}, "17 new tokens"),
    ],
)
def test_refused_sizes(change: dict[str, Any], message: str) -> None:
    problem = Problem(replace(Case(past=(20,)), **change))
    with pytest.raises(ValueError, match=message):
        problem.attend()
    reason = decode.unsupported_reason(
        problem.query, problem.key, problem.value, problem.case.config
    )
    assert reason is not None
    assert message in reason


@kernels
def test_refused_options() -> None:
    problem = Problem(Case())
    with pytest.raises(ValueError, match="num_sets is 3, key has 1 heads: 1, or a divisor 3"):
        problem.attend(num_sets=3)
    with pytest.raises(ValueError, match=r"gate_offset must be \(3,\) on .*, got \(2,\)"):
        problem.attend(gate_offset=torch.zeros(2, device=DEVICE))
    offset, bias = (torch.zeros(size, device=DEVICE) for size in (3, 3 * problem.query.shape[1]))
    with pytest.raises(ValueError, match=r"gate_bias must be \(\d+,\) on .*, got \(3,\)"):
        problem.attend(gate_offset=offset, gate_bias=offset)
    with pytest.raises(ValueError, match=r"gate_bias must be contiguous, got stride \(2,\)"):
        problem.attend(gate_offset=offset, gate_bias=bias.repeat(2)[::2])
    with pytest.raises(ValueError, match="gate_bias is added to logits: give gate_offset too"):
        problem.attend(gate_bias=bias)
    logits = torch.zeros(1, 8, device=DEVICE)
    for phi, message in (
        (decode.Phi("weighted", (logits,)), r"φ of value has parameters \(\); weighted has"),
        (decode.Phi("mlp", (logits,), (logits,)), r"φ of key has parameters \(\(1, 8\),\); mlp"),
        (
            decode.Phi("max"),
            "φ of key is of the kind 'max'; known are mean, weighted",
        ),
        (
            decode.Phi("weighted", (logits.repeat(1, 2)[:, ::2],), (logits,)),
            "must be contiguous on",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            problem.step(phi=phi)
    problem.new_value = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match="new_key and new_value must be given together"):
        problem.step()
    problem.compressed_key = problem.compressed_key[:, :, :3]
    problem.compressed_value = problem.compressed_value[:, :, :3]
    with pytest.raises(ValueError, match="compressed_key has 3 rows; a capacity of 170 tokens"):
        problem.attend()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes CPU tensors")
def test_refused_on_the_cpu() -> None:
    x = torch.zeros(1, 1, 32, 16)
    with pytest.raises(ValueError, match="the Triton kernels need CUDA tensors, got cpu"):
        decode.decode_attention(
            x[:, :, :1], x, x, x, x, torch.ones(1, 1, 1, 3), torch.zeros(1, dtype=torch.int32),
            config=SMALL,
        )  # fmt: skip


PAPER = NSAConfig()
NSA_1B = NSAConfig(16, 16, 16, 16, 0, 1, 128, "mean", "tiled_top_k")
BF16 = torch.bfloat16


def gpu_rows(problem: Problem, out: Tensor, aux: decode.DecodeAux, rows: list[int]) -> None:
    """Some rows against float64 on the GPU, from the choice that was made, and the choice."""
    case, config = problem.case, problem.case.config
    assert case.tokens == 1
    for row in rows:
        t = case.past[row]
        position = torch.arange(t + 1, device=DEVICE)
        blocks = aux.blocks[row, :, 0].long()
        q = problem.query[row, :, 0].double().unflatten(0, (case.kv_heads, case.group))
        chosen = (blocks[:, :, None] == position // config.select_block_size).any(1)
        near = position > t - config.window_size
        want = torch.zeros(case.kv_heads, case.group, case.value_dim, device=DEVICE).double()
        gates = problem.gates[row, :, 0].double().unflatten(0, (case.kv_heads, case.group))
        number = config.num_compressed_blocks(t + 1)
        for branch, (keys, values, mask) in enumerate(
            (
                (problem.compressed_key, problem.compressed_value, None),
                (problem.all_key, problem.all_value, chosen),
                (problem.all_key, problem.all_value, near.expand_as(chosen)),
            )
        ):
            count = t + 1 if branch else number
            logits = q @ keys[row, :, :count].double().mT * case.head_dim**-0.5
            if mask is not None:
                logits = logits.masked_fill(~mask[:, None], float("-inf"))
            p = logits.softmax(-1) if count else logits
            if not branch:
                probabilities = p
            part = p @ values[row, :, :count].double()
            want += gates[:, :, branch, None] * part
        error = oracle.relative_error(to_float64(out[row, :, 0]), to_float64(want.flatten(0, 1)))
        assert error < 2**-7, (row, error)  # one bfloat16 rounding of p, one of the result
        scores = oracle.block_scores(
            probabilities.flatten(0, 1)[None, :, None].cpu().numpy(),
            config, config.num_select_blocks(t + 1), case.kv_heads,
        )  # fmt: skip
        picked = aux.blocks[row : row + 1].cpu().numpy()
        assert oracle.choice_excess(picked, scores, config, t) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kv_heads", "group", "dims", "past"),
    [
        (4, 16, (128, 128), (65535, 0, 31, 40000)),
        (8, 4, (128, 128), (65535, 1, 4097)),
        (2, 12, (192, 128), (30000, 511)),
        (1, 32, (64, 64), (262143, 2000)),
    ],
)
def test_long_rows_beside_short_ones(
    kv_heads: int, group: int, dims: tuple[int, int], past: tuple[int, ...]
) -> None:
    check_on_the_gpu(Case(PAPER, past, 1, max(past) + 1, kv_heads, group, *dims, BF16))


@pytest.mark.gpu
def test_long_rows_of_tiles() -> None:
    """The sizes of NSA-1B."""
    past = (65535, 0, 255, 256, 40000)
    check_on_the_gpu(Case(NSA_1B, past, 1, 65536, 2, 16, 64, 64, BF16))


def check_on_the_gpu(case: Case) -> None:
    """Some rows, and the same bits again."""
    problem, past = Problem(case), case.past
    out, aux = problem.step()
    gpu_rows(problem, out, aux, list(range(len(past))))
    again, aux_again = problem.step()
    assert torch.equal(out, again)
    assert torch.equal(aux.blocks, aux_again.blocks)


@pytest.mark.gpu
def test_one_cuda_graph_serves_all_lengths() -> None:
    """Replayed while the rows grow, every result is that of an eager step and of the oracle."""
    case = Case(PAPER, (1990, 0, 15), 1, 2100, 2, 4, 64, 64, BF16)
    problem = Problem(case)
    eager = Problem(case)
    for name, x in vars(problem).items():
        if isinstance(x, Tensor):
            setattr(eager, name, x.clone())
    problem.step()  # compiles; what it stores is stored again
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, aux = problem.step()
        problem.lengths += 1
    for step in range(100):
        past = tuple(start + step for start in case.past)
        for x in (problem.query, problem.new_key, problem.new_value):
            x.copy_(torch.randn_like(x))
        for row, slot in enumerate(past):
            problem.all_key[row, :, slot] = problem.new_key[row, :, 0]
            problem.all_value[row, :, slot] = problem.new_value[row, :, 0]
        graph.replay()
        for name in ("query", "new_key", "new_value"):
            getattr(eager, name).copy_(getattr(problem, name))
        out, _ = eager.step()
        eager.lengths += 1
        assert torch.equal(out, captured)
        if step % 9 == 0:
            problem.case = replace(case, past=past)
            check(problem, captured, aux)
    assert problem.lengths.tolist() == [start + 100 for start in case.past]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("past", [(1990, 0, 15), tuple(range(1900, 2029))])
def test_captured_layers_with_products(kind: Any, past: tuple[int, ...]) -> None:
    """Steps of several layers overlap in a graph; attention waits for φ only where it writes."""
    case = Case(PAPER, past, 1, 2128, 2, 4, 64, 64, BF16)
    layers, twins = [Problem(case) for _ in range(3)], []
    phi = phi_of(*random_phi(kind, PAPER, 2, (64, 64), BF16))
    for layer in layers:
        layer.lengths = layers[0].lengths
        twins.append(copy.copy(layer))
        for name, x in vars(layer).items():
            if isinstance(x, Tensor):
                setattr(twins[-1], name, x.clone())
        layer.step(phi=phi)  # compiles; what it stores is stored again
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [layer.step(phi=phi)[0] for layer in layers]
        layers[0].lengths += 1
    for _ in range(64):
        for layer, twin in zip(layers, twins, strict=True):
            for name in ("query", "new_key", "new_value"):
                x = getattr(layer, name)
                getattr(twin, name).copy_(x.copy_(torch.randn_like(x)))
        graph.replay()
        for out, twin in zip(captured, twins, strict=True):
            torch.cuda.synchronize()  # nothing overlaps with this
            assert torch.equal(out, twin.step(phi=phi)[0])
            twin.lengths += 1
    for layer, twin in zip(layers, twins, strict=True):
        for x, y in zip(layer.cache, twin.cache, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_captured_step_attends_the_block_of_its_own_token(kind: Any) -> None:
    """Products and attention overlap; with other tokens and a row of NaN, each replay shows it."""
    past = (8191, 4095, 8190)  # the last row completes none
    problem = Problem(Case(PAPER, past, 1, 8192, 4, 16, 128, 128, BF16))
    maps = random_phi(kind, PAPER, 4, (128, 128), BF16)
    problem.step(phi=phi_of(*maps))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = problem.step(phi=phi_of(*maps))
    size = PAPER.compress_block_size
    blocks = [PAPER.num_compressed_blocks(start + 1) - 1 for start in past[:2]]
    for replay in range(200):
        for x in (problem.query, problem.new_key, problem.new_value):
            x.copy_(torch.randn_like(x))
        for row, block in enumerate(blocks):
            for _, compressed in problem.pairs():
                compressed[row, :, block] = float("nan")
        graph.replay()
        attended, _ = problem.attend()
        assert torch.equal(captured, attended)
        if replay % 50:
            continue
        for phi, (x, compressed) in zip(maps, problem.pairs(), strict=True):
            for row, block in enumerate(blocks):
                tokens = x[row : row + 1, :, past[row] + 1 - size : past[row] + 1]
                exact, eager = by_definition(phi, tokens.cpu()), phi(tokens)[0, :, 0]
                found = compressed[row, :, block]
                assert_close("compressed", found, exact[0, :, 0], eager, BF16)


@pytest.mark.gpu
def test_ten_thousand_steps_change_nothing() -> None:
    """No memory, no kernel and no wait for the device is added on the way."""
    problem = Problem(Case(PAPER, (0, 3), 1, 10_010, 1, 4, 64, 64, BF16))

    def step() -> None:
        problem.step()
        problem.lengths.add_(1)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    memory, peak, compiled = None, None, number_of_kernels()
    with no_synchronization():
        for i in range(10_000):
            step()
            if i == 10:
                memory, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    assert torch.cuda.memory_allocated() == memory
    assert torch.cuda.max_memory_allocated() == peak
    assert number_of_kernels() == compiled
    assert problem.lengths.tolist() == [10_001, 10_004]
    assert problem.key[0, :, :10_001].isfinite().all()
    assert problem.compressed_key[0, :, : PAPER.num_compressed_blocks(10_001)].isfinite().all()


def number_of_kernels() -> int:
    """Compiled variants of the kernels of a step in this process."""
    names = (
        "decode_append_kernel",
        "decode_compressed_kernel",
        "decode_topk_kernel",
        "decode_selected_sliding_kernel",
        "decode_combine_kernel",
    )
    return sum(
        len(cache[0])
        for name in names
        for cache in getattr(decode_launch, name).device_caches.values()
    )
