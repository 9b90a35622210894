"""Imports go down the layers only: memory < ops < nn; memory < edit < evals; lab, cli and studio on top."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rebind

PACKAGE = Path(rebind.__file__).parent

# What each layer may import of the package, besides itself and what stands beside `rebind.errors`.
BESIDE = {"errors", "files", "storage", "precision", "cuda_graphs", "version"}
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "__main__": {"cli"},
    "files": set(),
    "storage": set(),
    "precision": set(),
    "cuda_graphs": set(),
    "version": set(),
    "memory": set(),
    "ops": {"memory"},
    "nn": {"memory", "ops"},
    "models": {"memory", "nn"},
    "edit": {"memory", "models", "analysis"},
    "analysis": {"memory", "models", "edit"},
    "evals": {"memory", "models", "edit", "analysis"},
    "bench": {"ops"},
    "lab": {"memory", "ops", "nn", "models", "edit", "analysis", "evals"},
    "cli": {"memory", "ops", "nn", "models", "edit", "analysis", "evals", "bench", "lab", "studio"},
    "studio": {"memory", "ops", "nn", "models", "edit", "analysis", "evals", "lab"},
}


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(source: str, module: str) -> set[str]:
    """The rebind modules that a file imports, relative imports resolved against `module`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {name} if name != "rebind" else {f"rebind.{alias.name}" for alias in node.names}
    return {name for name in found if name == "rebind" or name.startswith("rebind.")}


def goes_up(layer: str, imported: str) -> bool:
    parts = imported.split(".")
    return len(parts) < 2 or parts[1] not in BELOW[layer] | BESIDE | {layer}


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    layer = layer_of(path)
    assert layer in BELOW, f"{path.name} is in no layer: give it one in BELOW and in docs/architecture.md"
    module = ".".join(["rebind", *path.relative_to(PACKAGE).with_suffix("").parts])
    upward = sorted(name for name in imports(path.read_text(), module) if goes_up(layer, name))
    assert not upward, f"{layer} may not import {', '.join(upward)}"


@pytest.mark.parametrize(
    ("layer", "source", "up"),
    [
        ("memory", "from rebind.ops import scan", True),
        ("memory", "from rebind import Memory", True),
        ("memory", "import rebind", True),
        ("memory", "from ..edit import Editor", True),
        ("memory", "from .write import Write", False),
        ("memory", "from rebind.errors import InputError", False),
        ("ops", "def f():\n    from rebind.nn import FastWeight", True),
        ("ops", "from rebind.memory.write import Write", False),
        ("edit", "import rebind.evals.metrics", True),
        ("evals", "from rebind.edit import editor", False),
    ],
)
def test_the_check_sees_what_it_should(layer, source, up):
    assert any(goes_up(layer, name) for name in imports(source, f"rebind.{layer}.module")) is up


def test_the_algebra_is_pure_torch():
    for path in (PACKAGE / "memory").rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
        outside = {name.split(".")[0] for name in names} & {"transformers", "peft", "triton", "numpy", "scipy"}
        assert not outside, f"{path.name} imports {outside}"
        assert "nn.Module" not in path.read_text(), f"{path.name} makes a module"
