"""`rebind studio` on the command line: what it needs, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
from typer.testing import CliRunner

from rebind.cli.app import app
from rebind.studio import server


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path):
    """Nothing outside of the test's own folder is read or written."""
    for name in ("REBIND_CACHE", "REBIND_LEDGERS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def run(*words):
    return CliRunner().invoke(app, ["studio", "--no-open", *words])


def test_there_is_no_share():
    assert run("--share").exit_code == 2
    assert "--share" not in CliRunner().invoke(app, ["studio", "--help"]).output


def test_a_taken_port_and_a_weak_token_are_refused_before_the_model_is_loaded():
    with server.open_socket("127.0.0.1", 0) as listener:
        result = run("--port", str(listener.getsockname()[1]))
    assert result.exit_code == 2
    assert "--port" in result.stderr
    result = run("--host", "0.0.0.0", "--token", "short")
    assert result.exit_code == 2
    assert "16 or more" in result.stderr


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_the_extra(monkeypatch, missing):
    for name in [name for name in sys.modules if name.startswith(("rebind.studio", f"{missing}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    result = run("--host", "no.such.address.invalid")  # where nothing can be served, should the import succeed
    assert result.exit_code == 2
    assert 'pip install "rebind[studio]"' in result.stderr


def test_the_other_commands_do_not_import_the_studio():
    script = (
        "import sys, rebind.cli.app; print([m for m in ('starlette', 'uvicorn', 'rebind.studio') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


def test_it_answers_at_the_address_that_it_prints(monkeypatch, tmp_path):
    """The model cannot be loaded: the page is there all the same, and says so."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    pages, stops, ready = [], [], threading.Event()
    serve = server.serve

    def serve_and_tell(studio, listener, host, token, announce):
        pages.append(server.page_address(host, listener, token))

        def when_ready():
            announce()
            ready.set()

        serve(studio, listener, host, token, when_ready, stops.append)

    monkeypatch.setattr(server, "serve", serve_and_tell)
    results = []
    words = ("--port", "0", "--model", str(tmp_path), "--quiet", "--host", "0.0.0.0")
    thread = threading.Thread(target=lambda: results.append(run(*words)))
    thread.start()
    assert ready.wait(60)
    try:
        assert "?token=" in pages[0]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(pages[0].split("?")[0])
        refused.value.close()
        assert refused.value.code == 401
    finally:
        stops[0]()
        thread.join()
    assert results[0].exit_code == 0, results[0].output
    assert results[0].stdout.strip() == pages[0]
