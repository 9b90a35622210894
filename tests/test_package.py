"""What users import: every public name, resolved on first use."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import rebind
import rebind.edit
from rebind import errors
from rebind.cli.commands import edit, learn, moments
from rebind.cli.commands.analysis.eval import evaluate
from rebind.edit import DEFAULT_METHOD
from rebind.edit.plan import plan_from_config
from rebind.evals import EvalConfig

BLOCK_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
import rebind
rebind.Memory
try:
    rebind.Editor
except ImportError as problem:
    sys.exit("pip install 'rebind[edit]'" not in str(problem))
"""


@pytest.mark.parametrize("package", [rebind, rebind.edit])
def test_every_public_name_resolves(package):
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError):
        package.no_such_name  # noqa: B018


def test_every_error_and_warning_is_public():
    raised = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert {error.__name__ for error in raised} <= set(rebind.__all__)


def test_the_default_method_is_one_constant():
    editor, config = rebind.Editor, EvalConfig()
    verbs = [editor.rewrite, editor.rewrite_many, editor.learn, editor.plan, editor.settings, plan_from_config]
    commands = [edit.edit, learn.learn, moments.moments, evaluate]
    defaults = {inspect.signature(call).parameters["method"].default for call in (*verbs, *commands)}
    assert defaults == {config.method} == {DEFAULT_METHOD} == {"dense"}


@pytest.mark.parametrize("code", ["import sys, rebind; sys.exit('torch' in sys.modules)", BLOCK_TRANSFORMERS])
def test_imports_are_lazy_and_a_missing_transformers_is_named(code):
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
