"""A studio on a tiny random model, its test client, and a browser on a real server.

`studio` and `client` need no browser. `live` is the address of a running server, `page` a page of Debian's Chromium at
that address; tests with `page` are skipped where there is no Chromium (`make browser` installs it where it can).
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rebind.edit.editor import Editor
from rebind.edit.settings import EditSettings
from rebind.edit.targets import ContextSettings
from rebind.studio import Access, Studio, create_app
from rebind.studio.server import open_socket, page_address, serve
from tests import tiny

PORT = 7860
STEPS = 4  # of a target search: enough to move the answers of a random model
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
]


def open_editor(ledger: Path | None = None) -> Editor:
    """Return an editor of a tiny random model, whose edits take a fraction of a second."""
    contexts = ContextSettings.of(1)
    editor = Editor(tiny.llama(), tiny.tokenizer(), ledger=ledger, corpus=tiny.texts(), guard=None, contexts=contexts)
    choose = editor.settings

    def few_steps(*arguments: Any, **options: Any) -> EditSettings:
        settings = choose(*arguments, **options)
        return replace(settings, targets=replace(settings.targets, steps=STEPS))

    editor.settings = few_steps  # type: ignore[method-assign]
    return editor


@pytest.fixture
def studio(tmp_path: Path) -> Iterator[Studio]:
    """A studio whose model is loaded; its ledger is on disk."""
    studio = Studio(lambda name: open_editor(tmp_path / "ledger"), model="tiny", export_folder=tmp_path / "exports")
    finish(studio, studio.load("tiny"))
    yield studio
    studio.close()


@pytest.fixture
def client(studio: Studio) -> TestClient:
    """A browser's view of the studio, without a browser."""
    return TestClient(create_app(studio, Access(PORT)), base_url=f"http://127.0.0.1:{PORT}")


def finish(studio: Studio, job: Any) -> Any:
    """Wait for a job inside the process and return its result."""
    assert studio.jobs.wait(job.id, 60).status == "done", job.error
    return job.result


def run_job(client: TestClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Start a job as the page does, and return its last state."""
    answer = client.post(path, json=body)
    assert answer.status_code == 202, answer.json()
    return wait_for(client, answer.json())


def wait_for(client: TestClient, state: dict[str, Any]) -> dict[str, Any]:
    """Follow a job as the page does, and return its last state."""
    while state["status"] in ("waiting", "running"):
        state = client.get(f"/api/jobs/{state['id']}", params={"after": state["version"]}).json()
    return state


@dataclass(frozen=True)
class Live:
    """A running server."""

    url: str
    studio: Studio


@pytest.fixture
def live(studio: Studio) -> Iterator[Live]:
    """A server on a free port of this machine."""
    listener = open_socket("127.0.0.1", 0)
    url, ready = page_address("127.0.0.1", listener, ""), threading.Event()
    stop: list[Any] = []
    thread = threading.Thread(target=serve, args=(studio, listener, "127.0.0.1", "", ready.set, stop.append))
    thread.start()
    assert ready.wait(20)
    yield Live(url, studio)
    stop[0]()
    thread.join()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: `make browser` installs it on Debian, as root")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=20_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def new_page(browser: Any, live: Live) -> Iterator[Any]:
    """Open pages at the studio, each a client of its own; no page may log an error or send a request elsewhere."""
    contexts, problems = [], []

    def watch(page: Any) -> None:
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
        page.on("request", lambda request: None if request.url.startswith(live.url) else problems.append(request.url))

    def open_page(fragment: str = "", **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        watch(page)
        page.goto(f"{live.url}#{fragment}")
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    # A refused input is a 4xx answer, which Chromium also logs
    assert [line for line in problems if "Failed to load resource" not in line] == []


@pytest.fixture
def page(new_page: Any) -> Any:
    """One page at the studio."""
    return new_page()
