"""The layers need torch alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rebind.nn


def test_layers_do_not_import_transformers():
    code = "import sys, rebind.nn; rebind.nn.FastWeight(8, 2); assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_name_is_there():
    assert set(dir(rebind.nn)) == set(rebind.nn.__all__)
    for name in rebind.nn.__all__:
        assert getattr(rebind.nn, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'RebindForEverything'"):
        rebind.nn.RebindForEverything  # noqa: B018
