"""The notebooks in examples/: stored without outputs, and they run; the practitioner's on a tiny model."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests import tiny

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def run(notebook: nbformat.NotebookNode, folder: Path, monkeypatch, **parameters: object) -> str:
    """Run a notebook in a folder, with other parameters, and return what it printed."""
    for name, value in {"PYTHONPATH": EXAMPLES.parent, "REBIND_CACHE": folder / "cache", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, str(value))
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    names = {line.split(" = ")[0] for line in cell.source.splitlines()}
    assert set(parameters) <= names
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(folder)}}).execute()
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.fixture
def model(tmp_path) -> str:
    tiny.llama(max_position_embeddings=128).save_pretrained(tmp_path / "tiny")
    tiny.tokenizer().save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def test_the_practitioners_notebook_runs_on_a_tiny_model(model, tmp_path, monkeypatch):
    printed = run(read("practitioner"), tmp_path, monkeypatch, MODEL=model, SETTINGS={"force": True})
    assert "said in framing start" in printed
    assert "rows attached: The capital of France is" in printed


def test_the_builders_notebook_runs(tmp_path, monkeypatch):
    assert "nats per character" in run(read("builder"), tmp_path, monkeypatch, STEPS=20, TOKENS=128)


def test_the_researchers_notebook_runs(tmp_path, monkeypatch):
    notebook = read("researcher")
    assert "suffers" in run(notebook, tmp_path, monkeypatch, SEEDS=2)
    figures = [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})
    ]
    assert len(figures) == 1


@pytest.mark.slow
def test_the_practitioners_notebook_runs_on_the_real_model(tmp_path, monkeypatch):
    assert "→ Rome" in run(read("practitioner"), tmp_path, monkeypatch)
