"""The documentation as a site: its pages are in the menu, guides stay short, and its check finds what is broken.

`make docs` builds the site and runs the check.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.site import problems

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MENU = (ROOT / "mkdocs.yml").read_text()
LONGEST_GUIDE = 2_400  # words: about ten minutes
GUIDES = re.findall(r"[\w-]+\.md", MENU.partition("- Guides:")[2].partition("- In depth:")[0])


def test_every_page_is_in_the_menu():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert pages == set(re.findall(r": ([\w/-]+\.md)$", MENU, re.MULTILINE))


@pytest.mark.parametrize("name", ["index.md", *GUIDES])
def test_a_guide_reads_in_ten_minutes(name):
    prose = re.sub(r"^```.*?^```", "", (DOCS / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) < LONGEST_GUIDE


@pytest.fixture
def site(tmp_path):
    """Write pages, and return what is wrong with them."""

    def check(body: str, other: str = "<h2 id='there'>x</h2>", style: str = "") -> list[str]:
        (tmp_path / "page.html").write_text(f"<html><body>{body}</body></html>")
        (tmp_path / "other.html").write_text(other)
        (tmp_path / "style.css").write_text(style)
        return problems(tmp_path)

    return check


@pytest.mark.parametrize(
    "body",
    [
        '<a href="other.html#there">x</a><a href="other.html">x</a><a href="#here">x</a><p id="here">',
        '<a href="https://example.com/anything">a reader may go there</a><a href="mailto:a@example.com">x</a>',
        '<img src="data:image/png;base64,AAAA"><link rel="canonical" href="https://example.com/page.html">',
        '<link rel="stylesheet" href="style.css">',
    ],
)
def test_the_check_accepts_a_sound_page(site, body):
    assert site(body, style=".a { background: url(data:image/svg+xml;utf8,x) }") == []


@pytest.mark.parametrize(
    ("body", "style"),
    [
        ('<a href="gone.html">x</a>', ""),
        ('<a href="other.html#gone">x</a>', ""),
        ('<a href="#gone">x</a>', ""),
        ('<img src="gone.png">', ""),
        ('<script src="https://cdn.example.com/x.js"></script>', ""),
        ('<link rel="stylesheet" href="//fonts.example.com/x.css">', ""),
        ('<p style="background: url(https://example.com/x.png)">x</p>', ""),
        ("", '@import "https://fonts.example.com/x.css";'),
        ("", ".a { src: url('https://fonts.example.com/x.woff2') }"),
    ],
)
def test_the_check_finds_what_is_broken(site, body, style):
    assert len(site(body, style=style)) == 1
