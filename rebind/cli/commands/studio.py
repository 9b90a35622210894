"""`rebind studio`: a local web page to edit a model by hand and watch memory work."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rebind.cli import completion
from rebind.cli import options as opt
from rebind.cli.session import open_editor
from rebind.cli.ui import Phases, Terminal
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.edit.editor import Editor

EXAMPLES = opt.examples(
    "rebind studio",
    "rebind studio --model Qwen/Qwen3-0.6B --port 8000",
    "rebind studio --host 0.0.0.0",
    note="The page edits a fact and shows the model before and after it, has a switch for every fact of the ledger, "
    "traces where a fact is recalled, and plays the rules of fast weights step by step. Nothing leaves this machine, "
    "and nothing is downloaded. Press Ctrl-C to stop; the edits are in the ledger.",
)


def studio(
    port: Annotated[int, opt.value("N", "Port of the page; 0 takes a free one.", min=0, max=65535)] = 7860,
    host: Annotated[
        str, opt.value("ADDRESS", "Address to listen at; other machines can only connect with a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        opt.value("TEXT", "Token that every request needs.", default="none; made up if others can connect"),
    ] = None,
    export_dir: Annotated[Path, opt.value("DIR", "Folder that exports are written into.")] = Path("rebind-exports"),
    no_open: Annotated[bool, opt.flag("--no-open", "Do not open the page in a browser.")] = False,
    *,
    source: opt.EditorOptions,
    terminal: Terminal,
) -> None:
    """Open a local web page to edit a model by hand and watch memory work."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the Hub's library: the studio downloads nothing
    try:
        from rebind.studio.server import open_socket, page_address, require_token, serve
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in ("starlette", "uvicorn"):
            raise
        advice = 'Run pip install "rebind[studio]"'
        raise InputError(f"The studio needs {package}", advice=advice, code="extra_not_installed") from None
    from rebind.models.locate import locate
    from rebind.studio.state import Studio

    token = require_token(host, token)
    if export_dir.expanduser().is_file():
        raise InputError(f"{str(export_dir)!r} is a file", expected="a folder", code="not_a_folder")
    with open_socket(host, port) as listener:
        locate(source.model)  # a name without a model ends the command; a model that does not load is the page's matter

        def load(model: str) -> Editor:
            ledger = source.ledger if model == source.model else None
            return open_editor(replace(source, model=model, ledger=ledger), Phases(terminal), "create")

        page = page_address(host, listener, token)
        room = Studio(load, model=source.model, export_folder=export_dir.expanduser(), models=completion.model_names())
        room.load(source.model)
        serve(room, listener, host, token, lambda: _announce(terminal, page, token, open_page=not no_open))


def _announce(terminal: Terminal, page: str, token: str, *, open_page: bool) -> None:
    terminal.result({"url": page, "token": token or None}, page)
    terminal.hint(f"rebind studio is at {page} (Ctrl-C to stop)")
    if open_page:
        import webbrowser

        webbrowser.open(page)
