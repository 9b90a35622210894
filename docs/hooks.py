"""Build the site: copy the files of the repository that pages link to, and show doctests as code.

On GitHub `[result](../benchmarks/results/scan-cpu.json)` leads to that file. A site has only what is in docs/, so the
file is copied, and the link is changed. A file that does not exist is a broken link, which stops a strict build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<path>[\w./-]+)(?P<anchor>#[\w-]+)?\)")
DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)  # up to the next empty line
SOURCE = "source"  # the folder in the site


def on_files(files: Files, *, config: Any) -> Files:
    """Add every file outside docs/ that a page links to."""
    linked = {
        path
        for file in files.documentation_pages()
        for path in _linked(Path(file.abs_src_path or "").read_text(), file)
    }
    for path in sorted(linked):
        files.append(File.generated(config, f"{SOURCE}/{_name(path)}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point links that leave docs/ at the copies."""
    up = "../" * page.file.src_uri.count("/")

    def change(match: re.Match[str]) -> str:
        path = _outside(match, page.file)
        return match[0] if path is None else f"]({up}{SOURCE}/{_name(path)})"

    return LINK.sub(change, markdown)


def _linked(markdown: str, file: File) -> set[str]:
    paths = (_outside(match, file) for match in LINK.finditer(markdown))
    return {path for path in paths if path is not None}


def _outside(match: re.Match[str], file: File) -> str | None:
    """Return the path of a link's target in the repository, if that is an existing file outside docs/."""
    target = (ROOT / "docs" / file.src_uri).parent / match["up"] / match["path"]
    path = target.resolve()
    if not path.is_file() or not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "docs"):
        return None
    return path.relative_to(ROOT).as_posix()


def _name(path: str) -> str:
    """Return the name of a copy: Markdown and Python are shown as text, not rendered."""
    return f"{path}.txt" if path.endswith((".md", ".py")) else path


class FencedDoctests(griffe.Extension):
    """Put the doctests of docstrings into code blocks; in Markdown `>>>` is a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that was just read."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
