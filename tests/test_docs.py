"""What the documents say is true: the tests they name exist, their Python runs, their links lead somewhere."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
README, CONTRIBUTING, ALGEBRA = ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "algebra.md"
GUIDES = [ROOT / "docs" / f"{name}.md" for name in ("index", "many-facts", "coming-from-easyedit", "scan", "dense")]
LAWS = "tests/memory/test_laws.py"

FENCE = re.compile(
    r"^(?P<indent>[ \t]*)(?P<mark>```+|~~~+)[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^[ \t]*(?P=mark)[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
INLINE_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
NODE = re.compile(r"\btests/[\w/-]+\.py(?:::\w+)*")
TARGETS = (
    re.compile(r"\]\(\s*<?([^\s<>()]+)>?(?:\s+[\"'(][^\n]*?[\"')])?\s*\)"),  # [text](target), ![image](target)
    re.compile(r"^ {0,3}\[[^\]\n]+\]:\s*<?([^\s<>]+)>?", re.MULTILINE),  # [name]: target
    re.compile(r"\b(?:src|srcset|href)\s*=\s*[\"']([^\"']+)[\"']"),  # <img src="target">
)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)


def present(*paths: Path) -> list[Path]:
    return [path for path in paths if path.exists()]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Tests that are named


def nodes(text: str) -> list[str]:
    """Every test file, class or function that the text names, as pytest would write it."""
    return NODE.findall(text)


def contained_tests(source: str) -> list[str]:
    """The tests of a file, `function` or `Class::function`."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test"):
                yield prefix + node.name
            elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                yield from walk(node.body, f"{prefix}{node.name}::")

    return list(walk(ast.parse(source).body, ""))


@cache
def known_tests(file: str) -> list[str]:
    """The tests of a file of the repository, read once however often documents name it."""
    return contained_tests((ROOT / file).read_text())


def node_exists(node: str) -> bool:
    """Whether the file is there and holds that test, or a test in that class."""
    file, *names = node.split("::")
    if not (ROOT / file).is_file():
        return False
    wanted = "::".join(names)
    return not names or any(test == wanted or test.startswith(f"{wanted}::") for test in known_tests(file))


@pytest.mark.parametrize("path", present(*DOCS, README), ids=name_of)
def test_named_tests_exist(path):
    missing = [node for node in nodes(path.read_text()) if not node_exists(node)]
    assert not missing, f"{name_of(path)} names tests that do not exist: {', '.join(missing)}"


def test_every_law_is_in_the_article():
    named = set(nodes(ALGEBRA.read_text()))
    laws = [f"{LAWS}::{test}" for test in known_tests(LAWS)]
    assert laws
    missing = [law for law in laws if law not in named]
    assert not missing, f"docs/algebra.md does not name {', '.join(missing)}: give each law a section"


@pytest.mark.parametrize(
    ("text", "exist"),
    [
        ("see `tests/memory/test_laws.py::test_writes_compose`.", [True]),
        ("tests/memory/test_laws.py::test_writes_compose[3-5]", [True]),
        ("tests/memory/test_rules.py::TestContract::test_vmap, tests/memory/test_rules.py::TestContract", [True, True]),
        ("tests/memory/test_laws.py", [True]),
        ("tests/memory/test_laws.py::test_writes_compos", [False]),
        ("tests/memory/test_rules.py::TestContract::test_nothing", [False]),
        ("tests/memory/test_rules.py::test_vmap", [False]),  # in a class, not at the top
        ("tests/memory/test_rules.py::gates_of", [False]),  # a function, not a test
        ("tests/memory/test_no_such_file.py::test_writes_compose", [False]),
        ("no tests are named here", []),
    ],
)
def test_the_check_knows_a_missing_test(text, exist):
    assert [node_exists(node) for node in nodes(text)] == exist


# Python that runs


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Each fenced block of Python, with the number of lines before its first."""
    for match in FENCE.finditer(text):
        if match["language"].lower() in ("python", "py"):
            yield text.count("\n", 0, match.start("code")), textwrap.dedent(match["code"])


def run_blocks(path: Path) -> int:
    """Run a document's blocks in order in one namespace; a traceback shows the document's own lines."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    count = 0
    for before, code in python_blocks(path.read_text()):
        exec(compile("\n" * before + code, str(path), "exec"), namespace)
        count += 1
    return count


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    """A folder to write in, and torch's global state put back afterwards."""
    monkeypatch.chdir(tmp_path)
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        yield tmp_path
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize("path", present(ALGEBRA, *GUIDES, README), ids=name_of)
def test_python_runs(path, sandbox):
    count = run_blocks(path)
    assert count or path == README, f"{name_of(path)} has no Python to run"


@pytest.mark.parametrize(
    ("text", "ran"),
    [
        ("```python\nx = 1\n```\nand\n```py\nassert x == 1\n```\n", 2),
        ("- in a list:\n\n  ```python\n  assert True\n  ```\n", 1),
        ("```\nassert False\n```\n```bash\nexit 1\n```\n", 0),
        ("````markdown\n```python\nassert False\n```\n````\n", 0),
        ("nothing to run", 0),
    ],
)
def test_blocks_run_in_order_in_one_namespace(text, ran, sandbox):
    document = sandbox / "document.md"
    document.write_text(text)
    assert run_blocks(document) == ran


def test_a_block_that_fails_points_at_its_line(sandbox):
    document = sandbox / "document.md"
    document.write_text("# Title\n\n```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as failure:
        run_blocks(document)
    last = failure.traceback[-1]
    assert (Path(last.path), last.lineno + 1) == (document, 5)


# Links that lead somewhere


def links(text: str) -> list[str]:
    """Targets of links and images, code left out."""
    prose = INLINE_CODE.sub("", FENCE.sub("", text))
    return [target for pattern in TARGETS for target in pattern.findall(prose)]


def anchors(text: str) -> set[str]:
    """What GitHub lets a link to this document point at: its headings, and ids given in HTML."""
    prose = FENCE.sub("", text)
    found: set[str] = set(re.findall(r"\b(?:id|name)\s*=\s*[\"']([^\"']+)[\"']", prose))
    for heading in re.findall(r"^ {0,3}#{1,6}[ \t]+(.+?)[ \t]*#*$", prose, re.MULTILINE):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        twin = next(count for count in range(len(found) + 1) if (f"{slug}-{count}" if count else slug) not in found)
        found.add(f"{slug}-{twin}" if twin else slug)
    return found


def leads_somewhere(target: str, page: Path) -> bool:
    """Whether a relative link on that page resolves, its #anchor too where it is one of a document."""
    if ELSEWHERE.match(target):
        return True
    place, _, anchor = unquote(target).partition("#")
    place = place.partition("?")[0]
    path = (ROOT / place.lstrip("/") if place.startswith("/") else page.parent / place).resolve() if place else page
    if not path.exists() or not path.is_relative_to(ROOT):
        return False
    return not anchor or path.suffix != ".md" or anchor in anchors(path.read_text())


@pytest.mark.parametrize("path", present(*DOCS, README, CONTRIBUTING), ids=name_of)
def test_links_resolve(path):
    broken = [target for target in links(path.read_text()) if not leads_somewhere(target, path)]
    assert not broken, f"{name_of(path)} links to what is not there: {', '.join(broken)}"


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ("[code](../rebind/memory/rules.py) and [text](https://example.com/nowhere)", [True, True]),
        ('[titled](../pyproject.toml "the project") [rooted](/LICENSE) [angled](<../LICENSE>)', [True, True, True]),
        ("[here](#the-one-write) [there](algebra.md#the-one-write)", [True, True]),
        ("[line](../rebind/memory/rules.py#L10)", [True]),
        ("`[not](a-link)` and\n```\n[nor](this)\n```\n", []),
        ("no links", []),
        ("[gone](../rebind/memory/rulez.py)", [False]),
        ("![image](no-such-figure.png)", [False]),
        ("[![badge](no-such-badge.svg)](no-such-page.md)", [False, False]),
        ("[by name][x]\n\n[x]: no-such-page.md", [False]),
        ('<img src="no-such-figure.png">', [False]),
        ("[anchor](#no-such-heading) [anchor](algebra.md#no-such-heading)", [False, False]),
        ("[outside](../../../../etc/hosts)", [False]),
    ],
)
def test_the_check_knows_a_broken_link(text, sound):
    assert [leads_somewhere(target, ALGEBRA) for target in links(text)] == sound


def test_headings_become_anchors():
    text = "# One `x`\n## Two: a, b\n## One x\n```\n# not a heading\n```\n### [Linked](x.md) d_k\n"
    assert anchors(text) == {"one-x", "two-a-b", "one-x-1", "linked-d_k"}
