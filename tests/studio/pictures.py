"""Take the pictures of the studio in docs/, with a real edit of SmolLM2 in Debian's Chromium.

python -m tests.studio.pictures docs/
"""

from __future__ import annotations

import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright

from rebind.edit.editor import Editor
from rebind.studio import Studio
from rebind.studio.server import open_socket, page_address, serve
from tests.studio.conftest import CHROMIUM, FLAGS

PATIENCE = 600_000  # milliseconds
SIZE = {"width": 1280, "height": 1130}


def write_fact(page: Page, sentence: str, target: str) -> None:
    """Write a fact on the Edit tab and wait for its result."""
    page.get_by_label("Sentence").fill(sentence)
    page.get_by_label("New target").fill(target)
    page.get_by_role("button", name="Write this fact").click()
    page.get_by_role("heading", name="Before").wait_for(timeout=PATIENCE)
    page.mouse.wheel(0, -10_000)


def take_pictures(url: str, folder: Path) -> None:
    """Edit two facts and take a picture of each tab that docs/studio.md shows."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(url)
        page.wait_for_selector("html[data-ready]")
        write_fact(page, "The capital of {France} is", "Rome")
        page.screenshot(path=folder / "studio-edit.png")
        page.emulate_media(color_scheme="dark")
        page.screenshot(path=folder / "studio-edit-dark.png")
        page.emulate_media(color_scheme="light")
        page.get_by_role("tab", name="Ledger").click()
        expect(page.locator(".watched-answer").nth(1)).to_have_text(re.compile("^Rome"), timeout=PATIENCE)
        page.screenshot(path=folder / "studio-ledger.png", clip={"x": 0, "y": 0, "width": SIZE["width"], "height": 900})
        browser.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        studio = Studio(lambda model: Editor(model, ledger=work / "ledger"), model="smollm2", export_folder=work)
        assert studio.jobs.wait(studio.load("smollm2").id, 300).status == "done"
        listener, ready, stop = open_socket("127.0.0.1", 0), threading.Event(), list[Any]()
        url = page_address("127.0.0.1", listener, "")
        server = threading.Thread(target=serve, args=(studio, listener, "127.0.0.1", "", ready.set, stop.append))
        server.start()
        try:
            assert ready.wait(20)
            take_pictures(url, Path(sys.argv[1]))
        finally:
            stop[0]()
            server.join()
            studio.close()


if __name__ == "__main__":
    main()
