"""The rules that conftest.py sets for every other test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

CONFTEST = Path(__file__).with_name("conftest.py")


def run_pytest(folder: Path, test: str, *arguments: str) -> str:
    """Output of pytest, with our conftest, on one file that holds `test`."""
    (folder / "test_it.py").write_text(test)
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    gpu: needs CUDA\n    exhaustive:\n"
    )
    environment = os.environ | {"PYTHONPATH": str(CONFTEST.parent), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_SEED", None)
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no second for those not needed here
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout


PRINTS = """
import torch
def test_first(): print("first", torch.rand(1).item())
def test_second(): print("second", torch.rand(1).item())
"""


def drawn(output: str) -> dict[str, str]:
    return dict(re.findall(r"(first|second) (\S+)", output))


def test_seed_repeats_a_test_whichever_others_run(tmp_path: Path) -> None:
    both = drawn(run_pytest(tmp_path, PRINTS, "--seed", "5"))
    alone = drawn(run_pytest(tmp_path, PRINTS, "--seed", "5", "-k", "second"))
    assert both["second"] == alone["second"]
    assert both["first"] != both["second"]


def test_workers_have_the_seed_that_repeats_a_failure(tmp_path: Path) -> None:
    test = PRINTS.replace('print("first", torch.rand(1).item())', "assert torch.rand(1) > 1")
    output = run_pytest(tmp_path, test, "-p", "xdist.plugin", "-n", "2", "--color=no")
    (seed,) = set(re.findall(r"repeat with --seed (\d+)", output))
    again = run_pytest(tmp_path, test, "--seed", seed, "--color=no")
    (drawn_value,) = set(re.findall(r"assert tensor\((\S+)\) > 1", output))
    assert f"assert tensor({drawn_value}) > 1" in again


def test_without_cuda_gpu_tests_are_deselected_and_a_failure_names_the_seed(
    tmp_path: Path,
) -> None:
    test = "import pytest\n@pytest.mark.gpu\ndef test_gpu(): pass\n"
    test += "def test_both(device): assert device.type == 'meta'\n"
    output = run_pytest(tmp_path, test, "--seed", "77")
    assert "1 failed, 2 deselected" in output
    assert "CUDA: none, gpu tests left out" in output
    assert "seed: 77 (--seed 77 repeats it)" in output
    assert "repeat with --seed 77" in output


HAS_EXHAUSTIVE = """
import pytest
@pytest.mark.exhaustive
def test_more(): pass
def test_one(): pass
@pytest.mark.kept(lambda x: x == 2)
@pytest.mark.parametrize("y", [3])
@pytest.mark.parametrize("x", [1, 2])
def test_some(x, y): pass
"""


def test_exhaustive_tests_run_where_the_expression_names_them(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, HAS_EXHAUSTIVE, "-m", "not gpu", "-v")
    assert re.findall(r"::(\S+) PASSED", output) == ["test_one", "test_some[2-3]"]
    output = run_pytest(tmp_path, HAS_EXHAUSTIVE, "-m", "exhaustive and not gpu", "-v")
    assert re.findall(r"::(\S+) PASSED", output) == ["test_more", "test_some[1-3]"]


def test_hypothesis_starts_every_example_from_the_same_torch_state() -> None:
    drawn_numbers = set()

    @given(st.integers(0, 9))
    def draw(_: int) -> None:
        drawn_numbers.add(torch.rand(()).item())

    draw()
    assert len(drawn_numbers) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_unwritten_floats_are_nan(dtype: torch.dtype) -> None:
    made = torch.empty(3, dtype=dtype)
    others = [torch.empty_like(made), made.new_empty(2), torch.empty_strided((2,), (1,))]
    assert all(tensor.isnan().all() for tensor in [made, *others])


def test_unwritten_integers_are_no_index() -> None:
    assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all()
    assert (torch.empty(3, dtype=torch.int64) == 2**63 - 1).all()


def test_poison_spares_modules_meta_tensors_and_compiled_graphs() -> None:
    linear = torch.nn.Linear(4, 4)
    assert linear.weight.isfinite().all()
    with torch.device("meta"):
        assert torch.empty(3).is_meta
    torch.compile(lambda x: torch.empty_like(x).fill_(1) + x, fullgraph=True, backend="eager")(
        torch.ones(3)
    )


def test_files_have_names_of_their_own() -> None:
    """Folders of tests are no packages: of two files of one name pytest would collect one."""
    names = [path.name for path in CONFTEST.parent.rglob("test_*.py")]
    assert len(names) == len(set(names))
