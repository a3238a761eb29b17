"""What CPUs never run, kernels' callers, tests/gpu and most of benchmarks, names things of the project that are there: their imports inside
functions, and the attributes of imported modules."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.cpu.stand_in_engine import stand_in

ROOT = Path(__file__).parents[2]
OURS = ("hybrid_megatron", "tests", "data_prep", "launch")
FILES = [path for folder in ("hybrid_megatron", "tests/gpu", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, object]]:
    """(name it is known by, thing) of what comes from the project; raises ImportError if it is not there."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            if alias.name.split(".")[0] in OURS and alias.asname:
                yield alias.asname, importlib.import_module(alias.name)
        elif node.level == 0 and node.module.split(".")[0] in OURS:
            module = importlib.import_module(node.module)
            if not hasattr(module, alias.name):
                importlib.import_module(f"{node.module}.{alias.name}")
            yield alias.asname or alias.name, getattr(module, alias.name)


def missing(source: str) -> list[str]:
    tree, found, modules = ast.parse(source), [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            try:
                modules |= {name: thing for name, thing in imported(node) if isinstance(thing, ModuleType)}
            except ImportError as error:
                found.append(f"line {node.lineno}: {error}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            if not hasattr(modules[node.value.id], node.attr):
                found.append(f"line {node.lineno}: {node.value.id}.{node.attr}")
    return found


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_names_are_there(monkeypatch, path):
    stand_in(monkeypatch)
    assert missing(path.read_text()) == []


def test_what_is_not_there_is_found():
    source = "from hybrid_megatron.model.attention import causal\nfrom hybrid_megatron.ops import silu, nothing\n"
    source += "def f():\n    from hybrid_megatron.ops.silu import nothing\n    return causal._nothing(silu.silu)\n"
    assert [line.split(":")[0] for line in missing(source)] == ["line 2", "line 4", "line 5"]
