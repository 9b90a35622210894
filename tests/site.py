"""Check the built site: every link leads somewhere, and nothing is loaded from another host.

python -m tests.site build/site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser loads by itself; `a href` is a link that a reader may follow.
LOADING = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("video", "src")}
NOT_LOADED = {"canonical", "next", "prev", "edit", "alternate"}  # kinds of <link>
IN_STYLES = re.compile(r"(?:@import\s+(?:url\()?|url\()\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class Page(HTMLParser):
    """The links of a page, what it loads, and the places in it that a link can name."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what a tag names."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        for name, value in values.items():
            if (tag, name) in LOADING and not (tag == "link" and values.get("rel") in NOT_LOADED):
                self.loads.append(value)
        self.loads += IN_STYLES.findall(values.get("style", ""))


def problems(site: Path) -> list[str]:
    """Return what is wrong with a built site."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        broken += [f"{name} loads {url}" for url in page.loads if is_elsewhere(url)]
        local = [url for url in (*page.links, *page.loads) if not is_elsewhere(url) and not urlsplit(url).scheme]
        broken += [f"{name} links to {url}, which is not there" for url in local if not _leads(url, path, site, pages)]
    for style in sorted(site.rglob("*.css")):
        text = style.read_text(encoding="utf-8")
        broken += [f"{style.relative_to(site)} loads {url}" for url in IN_STYLES.findall(text)]
    return broken


def is_elsewhere(url: str) -> bool:
    """Return whether a URL names another host."""
    return bool(urlsplit(url).netloc)


def _leads(url: str, page: Path, site: Path, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(url)
    place, anchor = unquote(parts.path), unquote(parts.fragment)
    start = site if place.startswith("/") else page.parent
    target = (start / place.lstrip("/")).resolve() if place else page
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return False
    return not anchor or target not in pages or anchor in pages[target].anchors


if __name__ == "__main__":
    found = problems(Path(sys.argv[1]))
    sys.exit("\n".join(found) if found else None)
