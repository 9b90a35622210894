"""A studio on a tiny random model, its test client, and a browser on a real server."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from rebind.edit.editor import Editor
from rebind.edit.targets import ContextSettings
from rebind.studio import Access, Studio, create_app
from tests import tiny

PORT = 7860


def open_editor(ledger=None):
    """Return an editor of a tiny random model, whose edits take a fraction of a second."""
    contexts = ContextSettings.of(2)
    return Editor(tiny.llama(), tiny.tokenizer(), ledger=ledger, corpus=tiny.texts(), guard=None, contexts=contexts)


@pytest.fixture
def studio(tmp_path):
    """A studio whose model is loaded; its ledger is on disk."""
    studio = Studio(lambda name: open_editor(tmp_path / "ledger"), model="tiny", export_folder=tmp_path / "exports")
    finish(studio, studio.load("tiny"))
    yield studio
    studio.close()


@pytest.fixture
def client(studio):
    """A browser's view of the studio, without a browser."""
    return TestClient(create_app(studio, Access(PORT)), base_url=f"http://127.0.0.1:{PORT}")


def finish(studio, job):
    """Wait for a job inside the process and return its result."""
    assert studio.jobs.wait(job.id, 60).status == "done", job.error
    return job.result


def run_job(client, path, body):
    """Start a job as the page does, and return its last state."""
    answer = client.post(path, json=body)
    assert answer.status_code == 202, answer.json()
    state = answer.json()
    while state["status"] in ("waiting", "running"):
        state = client.get(f"/api/jobs/{state['id']}", params={"after": state["version"]}).json()
    return state
