"""Errors are data: fields, spelled settings, codes; and they survive pickling and torch.compile."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

import rebind
from rebind import errors
from rebind.errors import GuardError, InputError, RebindError, StorageError

PUBLIC = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


def test_a_message_states_problem_expectation_and_advice():
    error = InputError(
        "The search took {steps}",
        expected="more",
        advice="Try {steps}, or use {force}; see {layers}",
        settings={"steps": 60, "force": True, "layers": None},
        code="search_too_short",
    )
    assert str(error) == "The search took {steps}; expected more. Try steps=60, or use force=True; see layers."
    assert error.message(lambda name, value: f"--{name}").endswith("Try --steps, or use --force; see --layers.")
    assert error.code == "search_too_short"
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("kind", [kind for kind in PUBLIC if issubclass(kind, RebindError)])
def test_every_error_has_a_default_code_and_survives_pickling(kind):
    error = kind("Something is wrong", advice="Do it again", code="odd")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.code, again.advice) == (str(error), "odd", "Do it again")
    assert kind("x").code == kind.default_code
    assert str(kind("x")) == "x."


def test_errors_with_more_to_say():
    rejected = GuardError("x")
    rejected.checks = ("drift",)
    assert pickle.loads(pickle.dumps(rejected)).checks == ("drift",)
    assert isinstance(StorageError("x"), OSError)


@pytest.mark.parametrize("kind", PUBLIC)
def test_every_error_and_warning_can_be_imported_from_rebind(kind):
    assert getattr(rebind, kind.__name__) is kind


def test_an_error_inside_compiled_code_is_the_same_error():
    def refuse(x):
        if x.shape[0] > 1:
            raise InputError("Too long", code="too_long")
        return x

    with pytest.raises(InputError):
        torch.compile(refuse, backend="eager")(torch.ones(2))


def test_only_this_module_defines_public_errors():
    package = Path(rebind.__file__).parent
    elsewhere = [
        path
        for path in package.rglob("*.py")
        if path != package / "errors.py"
        and any(
            line.startswith("class ") and ("Error)" in line or "Warning)" in line)
            for line in path.read_text().splitlines()
        )
    ]
    assert not elsewhere
