"""The pages: their Python code runs, their links lead somewhere, what they name exists."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli.test_check_command import write_checkpoint
from test_public_names import PUBLIC
from torch import nn

import nsa_flex
from nsa_flex.backends.facts import BRANCHES
from nsa_flex.dispatch import IMPLEMENTATIONS
from nsa_flex.dispatch.table import CUDA_ORDER

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted([README, *(ROOT / "docs").rglob("*.md")])

PYTHON = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
FENCED = re.compile(r"^```.*?^```", re.M | re.S)
SHOWN = re.compile(r"\n\n```text\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"^#+ (.*)$", re.M)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def tiny_llama(*_args: Any, **_options: Any) -> nn.Module:
    """Stands in for pretrained weights, which no test downloads."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": None}  # no text is shorter by chance
    config = transformers.LlamaConfig(vocab_size=97, **sizes, **heads, **ends)
    return transformers.LlamaForCausalLM(config)


PUBLISHED = {  # tiny ones under upstream's names stand in for them
    "zen-E/NSA-1B": "NSA-1B",
    "openbmb/MiniCPM4.1-8B": "MiniCPM4",
    "MiniMaxAI/MiniMax-M3": "MiniMax-M3",
}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A place to write to; no downloads; torch.compile traces, but leaves code generation out.

    What Inductor makes of these paths has tests of its own.
    """
    monkeypatch.chdir(tmp_path)
    compile_traced = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile_traced)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        found = functools.partial(read_or_stand_in, auto.from_pretrained)
        monkeypatch.setattr(auto, "from_pretrained", found)


def read_or_stand_in(load: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
    if name in PUBLISHED and not Path(name).exists():
        Path(name).mkdir(parents=True)
        write_checkpoint(PUBLISHED[name], Path(name))
    return load(name, *args, **options) if Path(name).is_dir() else tiny_llama()


def names_a_reader_has() -> dict[str, Any]:
    """What patch.md takes as known: the usual imports, and a model around its attention."""
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": nn.functional, "nsa_flex": nsa_flex}
    names["GPT"] = lambda: nn.Sequential(names["CausalSelfAttention"](32, 4))
    return names


RECIPES = ROOT / "docs" / "guide" / "train.md"  # run section by section: training/test_recipes.py
with_code = [page for page in PAGES if page != RECIPES and PYTHON.search(page.read_text())]


@pytest.mark.kept(lambda page: page.name != "troubleshooting.md")
@pytest.mark.parametrize("page", with_code, ids=name_of)
def test_code_runs(page: Path, stand_ins: None) -> None:
    known = names_a_reader_has() if page.name == "patch.md" else {}
    text = page.read_text()
    for match in PYTHON.finditer(text):
        line = text.count("\n", 0, match.start()) + 1  # tracebacks show the line of the page
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * line + match[1], str(page), "exec"), known)
        if shown := SHOWN.match(text, match.end()):
            assert printed.getvalue() == shown[1]


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if link.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in {anchor_of(each) for each in HEADING.findall(target.read_text())}


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@every_page
def test_files_and_public_names_exist(page: Path) -> None:
    folders = "nsa_flex|masks|fallback_kernels|tests|docs"
    if "log" not in page.parts:  # which names tools that measured once
        folders += "|bench"
    for code in CODE.findall(FENCED.sub("", page.read_text())):
        if re.fullmatch(rf"({folders})/[\w/.-]*", code):
            assert (ROOT / code).exists(), f"{code} is not a file"
        dotted = re.match(r"nsa_flex(?:\.\w+)+", code)
        if dotted:
            resolve(dotted[0])


def resolve(dotted: str) -> Any:
    """The module, class or function of that name; it must say what it is."""
    found: Any = nsa_flex
    for name in dotted.split(".")[1:]:
        if not hasattr(found, name):
            found = importlib.import_module(f"{found.__name__}.{name}")
        else:
            found = getattr(found, name)
    assert found.__doc__, f"{dotted} has no docstring"
    return found


DECISIONS = ROOT / "docs" / "log" / "decisions"
NUMBERED = sorted(DECISIONS.glob("[0-9]*.md"))


def test_every_decision_has_the_four_parts() -> None:
    for page in NUMBERED:
        parts = ["Context", "Decision", "Consequences", "Reconsider when"]
        title, *found = HEADING.findall(page.read_text())
        assert title.startswith(f"{int(page.name[:4])}. ")
        assert found == parts, name_of(page)


def test_every_decision_is_listed_once_or_replaced() -> None:
    listed, replaced = (DECISIONS / "README.md").read_text().split("## Replaced")
    linked = [link for link in LINK.findall(listed) if link[0].isdigit()]
    assert sorted(linked) == [page.name for page in NUMBERED]
    gone = [int(number) for number in re.findall(r"(?:^- |and )(\d+),", replaced, re.M)]
    numbers = [int(page.name[:4]) for page in NUMBERED]
    assert sorted(numbers + gone) == list(range(1, max(numbers) + 1))


def test_every_image_is_used_and_drawn_by_the_script() -> None:
    script = (ROOT / "docs" / "make_images.py").read_text()
    linked = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in LINK.findall(page.read_text())
        if link.endswith(".png")
    }
    images = set((ROOT / "docs" / "images").glob("*.png"))
    measured = set((ROOT / "bench" / "results").glob("*.png"))  # each beside the row it draws
    assert images | measured == linked
    assert all(image.with_suffix(".json").exists() for image in measured)
    assert all(f'"{image.name}"' in script for image in images)


REFERENCE = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text(), re.M)


def documented(name: str) -> Any:
    """What an entry of the reference is about."""
    module, _, last = name.rpartition(".")
    found = getattr(importlib.import_module(module), last)
    assert found.__doc__, f"{name} has no docstring"
    return found


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_has_every_public_name(module: str) -> None:
    entries = [documented(name) for name in REFERENCE]
    public = {name: getattr(importlib.import_module(module), name) for name in PUBLIC[module]}
    assert [
        name
        for name, each in public.items()
        if (inspect.isclass(each) or inspect.isfunction(each))
        and not any(each is entry for entry in entries)
    ] == []


def test_the_reference_has_functions_not_modules_of_their_name() -> None:
    """mkdocstrings reads `package.name` as the module, if package/name.py defines the function."""
    assert len(set(REFERENCE)) == len(REFERENCE)
    for name in REFERENCE:
        home = getattr(documented(name), "__module__", "")
        last = name.rpartition(".")[2]
        if home.rpartition(".")[2] == last:
            assert name == f"{home}.{last}"


def test_the_readme_tells_what_auto_tries_on_cuda_and_what_it_does_not() -> None:
    rows = re.findall(r"^\| (\w+) \| dense \| (.*?) \| (.*?) ?\|$", README.read_text(), re.M)
    told = {branch: tuple(order.split(", ")) for branch, order, _ in rows}
    assert told == CUDA_ORDER
    others = {branch: set(re.findall(r"\w+", names)) for branch, _, names in rows}
    offered = {branch: {n for n, of in IMPLEMENTATIONS if of == branch} for branch in BRANCHES}
    assert others == {branch: offered[branch] - set(CUDA_ORDER[branch]) for branch in BRANCHES}


def test_errors_that_troubleshooting_quotes_are_raised_somewhere() -> None:
    page = (ROOT / "docs" / "guide" / "troubleshooting.md").read_text()
    tables = page[page.index("## Errors from patch") : page.index("## Compilation")]
    quoted = re.findall(r"^\| `([^`]*)` \|", tables, re.M)
    texts = [text for source in SOURCES for text in texts_of(source)]
    for error in quoted:
        parts = [re.escape(part) for part in error.split("…")]
        assert any(re.search(".*".join(parts), text) for text in texts), f"nothing says {error!r}"
    assert len(quoted) > 20


SOURCES = sorted((ROOT / "nsa_flex").rglob("*.py"))


def texts_of(source: Path) -> list[str]:
    """The strings of a file; what an f-string fills in is an ellipsis."""
    found = []
    for node in ast.walk(ast.parse(source.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        if all(isinstance(part, ast.Constant | ast.FormattedValue) for part in parts):
            found.append(
                "".join(
                    str(getattr(part, "value", "…")) if isinstance(part, ast.Constant) else "…"
                    for part in parts
                )
            )
    return found


WALK = (ROOT / "docs" / "design" / "walk.md").read_text()


def test_the_walk_has_at_most_15_files_each_once() -> None:
    files = re.findall(r"`((?:nsa_flex|fallback_kernels)/[\w/]+\.py)`", WALK)
    assert len(files) == len(set(files)) <= 15
    assert len(files) == len(re.findall(r"^\| \d+ \|", WALK, re.M)) + 1  # and the route


def test_the_walk_names_the_kernels_of_its_call() -> None:
    """As `explain` lists them for Hopper."""
    query, key = (
        torch.empty(1, 65536, heads, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        for heads in (32, 8)
    )
    plan = nsa_flex.explain(query, key, device="cuda", needs_grad=True)
    named = set(re.findall(r"`(\w+_kernel)`", WALK))
    assert named == plan.kernels.names
