"""A static look at the sources that a callable runs: reads of tensor values, executed or not.

From `forward` of every module class (or from the function itself) it follows methods called on
`self` and functions of the same sources, and looks at nothing else. Torch, the standard library
and, unless asked, installed packages are left out.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from nsa_flex.auditing.mends import mend_of
from nsa_flex.auditing.report import AuditFinding
from nsa_flex.auditing.sources import INSTALLED, syntax_tree, unwrapped

Scope = Literal["own", "all", "none"]

_READS = {"item", "tolist", "numpy", "cpu", "nonzero", "masked_select"}
_DATA_DEPENDENT = {"unique", "unique_consecutive", "bincount", "argwhere"}
_NEVER = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib") + "/")


def lint(fn: Callable, scope: Scope = "own") -> list[AuditFinding]:
    """Findings in the sources of `fn`; scope "all" includes installed packages.

    >>> def scaled(x):
    ...     return x * x.max().item()
    >>> [finding.message for finding in lint(scaled)]  # a doctest has no source file
    []
    """
    if scope == "none":
        return []
    found: list[AuditFinding] = []
    for function in _reachable(fn, scope):
        node = _node_of(function)
        if node is not None:
            found += _offences(node, function)
    return list(dict.fromkeys(found))


def _reachable(fn: Any, scope: Scope) -> Iterator[types.FunctionType]:
    waiting: list[tuple[Any, type | None]] = [(fn, None)]
    seen: set[int] = set()
    while waiting:
        each, owner = waiting.pop()
        each, owner = unwrapped(each, owner)
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.nn.Module):
            waiting += [(type(m).forward, type(m)) for m in each.modules()]
        elif isinstance(each, types.FunctionType) and _in_scope(each, scope):
            yield each
            waiting += _callees(each, owner)


def _in_scope(function: types.FunctionType, scope: Scope) -> bool:
    file = function.__code__.co_filename
    if file.startswith(INSTALLED):
        return scope == "all" and not file.startswith(_NEVER)
    return not file.startswith(_NEVER) and Path(file).is_file()


def _callees(function: types.FunctionType, owner: type | None) -> list[tuple[Any, type | None]]:
    """What it names: globals, closures, and methods of its own class."""
    node = _node_of(function)
    if node is None:
        return []
    known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    found: list[tuple[Any, type | None]] = []
    for each in _inside(node):
        if isinstance(each, ast.Name):
            value = known.get(each.id)
            if isinstance(value, (types.FunctionType, torch.nn.Module, functools.partial)):
                found.append((value, None))
        elif isinstance(each, ast.Attribute) and owner is not None and _is_self(each.value):
            found.append((inspect.getattr_static(owner, each.attr, None), owner))
    return found


def _inside(function: ast.AST) -> Iterator[ast.AST]:
    """Everything in a function's body: what its decorators and defaults do, it does not."""
    body = function.body  # type: ignore[attr-defined]
    for part in body if isinstance(body, list) else [body]:
        yield from ast.walk(part)


def _is_self(node: ast.expr) -> bool:
    is_super = isinstance(node, ast.Call) and ast.unparse(node.func) == "super"
    return is_super or (isinstance(node, ast.Name) and node.id == "self")


def _node_of(function: types.FunctionType) -> ast.AST | None:
    code = function.__code__
    tree = syntax_tree(code.co_filename)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno and node.name == code.co_name:
                return node
        elif isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            if node.lineno == code.co_firstlineno and names == _arguments(code):
                return node
    return None


def _arguments(code: types.CodeType) -> list[str]:
    return list(code.co_varnames[: code.co_argcount])


def _offences(root: ast.AST, function: types.FunctionType) -> Iterator[AuditFinding]:
    code = function.__code__
    for node in _inside(root):
        text = None
        if isinstance(node, ast.Call):
            text = _call_offence(node)
        elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            text = _branch_offence(node.test)
        if text is not None:
            where = f"{code.co_filename}:{node.lineno} in {code.co_name}"  # type: ignore[attr-defined]
            yield AuditFinding("lint", text, where, mend_of("host-sync", text), ("sources",))


def _call_offence(call: ast.Call) -> str | None:
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    if name == "print" and any(not isinstance(arg, ast.Constant) for arg in call.args):
        return "print, which reads a tensor that it is given"
    if not isinstance(call.func, ast.Attribute):
        return None
    if last in _READS and not (last == "item" and call.args):
        return f".{last}()"
    if last in _DATA_DEPENDENT:
        return f".{last}(), whose output shape depends on values"
    if last == "where" and name == "torch.where" and len(call.args) == 1:
        return "torch.where of one argument (nonzero)"
    if last == "synchronize":
        return f"{name}() synchronizes"
    if last == "to" and any(isinstance(a, ast.Constant) and a.value == "cpu" for a in call.args):
        return ".to('cpu') (as .cpu())"
    return None


def _branch_offence(test: ast.expr) -> str | None:
    """`if x.any():` and the like; `any(...)` of Python is no attribute."""
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("any", "all") and not isinstance(node.func.value, ast.Constant):
                return f"a branch on .{node.func.attr}(): bool(tensor)"
            if ast.unparse(node.func) in ("torch.any", "torch.all", "torch.equal"):
                return f"a branch on {ast.unparse(node.func)}: bool(tensor)"
    return None
