"""The structure of the package: imports go down the layers, modules form no cycle, folders stay small."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rebind

PACKAGE = Path(rebind.__file__).parent
MOST_MODULES = 15  # in one folder, besides __init__.py

# What each layer may import of the package, besides itself. docs/architecture.md draws this.
FOUNDATION = {"errors", "limits", "storage", "parallel", "precision", "plotting", "cuda_graphs", "version"}
ALGEBRA = FOUNDATION | {"memory", "ops"}
EDITING = ALGEBRA | {"nn", "models", "edit"}
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "limits": set(),
    "version": set(),
    "precision": {"errors"},
    "plotting": {"errors"},
    "cuda_graphs": {"errors"},
    "storage": {"errors"},
    "parallel": {"errors", "storage"},
    "memory": FOUNDATION,
    "ops": FOUNDATION | {"memory"},
    "bench": ALGEBRA,
    "nn": ALGEBRA,
    "compat": ALGEBRA | {"nn"},
    "models": ALGEBRA | {"nn"},
    "edit": ALGEBRA | {"nn", "models"},
    "analysis": EDITING,
    "evals": EDITING | {"analysis"},
    "lab": EDITING | {"analysis", "evals", "bench"},
    "studio": EDITING | {"analysis", "evals", "lab"},
    "cli": EDITING | {"analysis", "evals", "bench", "lab", "studio"},
    "__main__": {"cli"},
}


def name_of(path: Path) -> str:
    """Return the dotted name of a module, that of the package for an `__init__.py`."""
    parts = ["rebind", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported_by(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Return every rebind module that a source names: imports anywhere in it, and dotted names in strings."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            home = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{home}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "files"):
                names.add(str(node.args[0].value))
    return {name for name in names if name == "rebind" or name.startswith("rebind.")}


def goes_up(layer: str, imported: str) -> bool:
    parts = imported.split(".")
    return len(parts) < 2 or parts[1] not in BELOW[layer] | {layer}


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {name_of(path): path for path in FILES}
INSIDE = [path for path in FILES if path != PACKAGE / "__init__.py"]
FOLDERS = sorted({path.parent for path in INSIDE})
ids = {"ids": lambda path: str(path.relative_to(PACKAGE))}


@pytest.mark.parametrize("path", INSIDE, **ids)
def test_imports_go_down(path):
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert layer in BELOW, f"{path.name} is in no layer: add it to BELOW and to docs/architecture.md"
    names = imported_by(path.read_text(), name_of(path), is_package=path.name == "__init__.py")
    upward = sorted(name for name in names if goes_up(layer, name))
    assert not upward, f"{layer} may not import {', '.join(upward)}"


def module_named(name: str) -> str | None:
    """Return the module that provides a dotted name: the name itself, or what it is imported from."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def test_modules_form_no_cycle():
    graph = {}
    for name, path in MODULES.items():
        if path.name == "__init__.py":  # exports what is below it
            continue
        needs = {module_named(imported) for imported in imported_by(path.read_text(), name, is_package=False)}
        graph[name] = {need for need in needs if need and need != name and MODULES[need].name != "__init__.py"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as problem:
        pytest.fail(f"modules import each other: {' → '.join(problem.args[1])}")


@pytest.mark.parametrize("folder", FOLDERS, **ids)
def test_folders_are_small_and_say_what_they_hold(folder):
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES, f"{len(modules)} modules: make two folders of them"
    if folder != PACKAGE:
        purpose = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert len(purpose) > 40, "the docstring of __init__.py must state the purpose of the package"


def test_class_names_are_unique():
    classes = Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in classes.items() if count > 1]


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
        ("ops", "if TYPE_CHECKING:\n    from rebind.nn import FastWeight", True),
        ("ops", "import_module('rebind.nn.lm')", True),
        ("ops", "from rebind.memory.write import Write", False),
        ("edit", "import rebind.evals.metrics", True),
        ("evals", "from rebind.edit import editor", False),
    ],
)
def test_the_check_sees_what_it_should(layer, source, up):
    assert any(goes_up(layer, name) for name in imported_by(source, f"rebind.{layer}.module")) is up


def test_the_algebra_is_pure_torch():
    for path in (PACKAGE / "memory").rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
        outside = {name.split(".")[0] for name in names} & {"transformers", "peft", "triton", "numpy", "scipy"}
        assert not outside, f"{path.name} imports {outside}"
        assert "nn.Module" not in path.read_text(), f"{path.name} makes a module"
