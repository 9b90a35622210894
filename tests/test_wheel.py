"""The wheel and the source distribution: what is in them, and that an installed wheel works without the source tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hatchling import build

import rebind
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent


def package_files(root: Path) -> set[str]:
    """Return every file of the package that is not a cache."""
    files = (path for path in (root / "rebind").rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix() for path in files if "__pycache__" not in path.parts}


def files_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def build_in(source: Path, out: Path, kind: str) -> Path:
    """Build in this process, with hatchling alone, so that nothing is downloaded."""
    before = Path.cwd()
    os.chdir(source)
    try:
        return out / (build.build_wheel(str(out)) if kind == "wheel" else build.build_sdist(str(out)))
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_in(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build_in(ROOT, folder, "sdist")) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"rebind-{rebind.__version__}"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel; what the wheel depends on is found where these tests find it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    paths = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
    python = Path(paths["scripts"]) / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=600, env=clean_environment())
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(paths["purelib"]) / "dependencies.pth").write_text("\n".join(sorted(dependencies)) + "\n")
    return Path(paths["scripts"])


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}


def places(folder: Path) -> dict[str, str]:
    """Return an environment in which everything is stored in a folder."""
    own = {"REBIND_CACHE": str(folder / "cache"), "REBIND_LEDGERS": str(folder / "ledgers"), "HF_HUB_OFFLINE": "1"}
    return clean_environment() | own


def run(installed: Path, folder: Path, *words: str, timeout: int = 600) -> str:
    """Run the installed command outside the source tree, and return its standard output."""
    ended = subprocess.run(
        [str(installed / words[0]), *words[1:]],
        cwd=folder,
        env=places(folder),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    information = f"rebind-{rebind.__version__}.dist-info"
    inside = files_in(wheel)
    assert {name for name in inside if not name.startswith(information)} == package_files(ROOT)
    assert {f"{information}/{name}" for name in ("METADATA", "entry_points.txt", "licenses/LICENSE")} <= inside
    assert "rebind/evals/data/facts.jsonl" in inside
    assert "rebind/py.typed" in inside


def test_the_source_distribution_builds_the_same_wheel(wheel, unpacked, tmp_path):
    for name in (
        "README.md",
        "LICENSE",
        "tests/tiny.py",
        "docs/algebra.md",
        "mkdocs.yml",
        "Makefile",
        "constraints.txt",
    ):
        assert (unpacked / name).is_file(), name
    assert files_in(build_in(unpacked, tmp_path, "wheel")) == files_in(wheel)


def test_the_installed_wheel_edits_a_model(installed, tmp_path):
    where = run(installed, tmp_path, "python", "-c", "import rebind; print(rebind.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert run(installed, tmp_path, "rebind", "--version").startswith(f"rebind {rebind.__version__}, torch ")
    report = json.loads(run(installed, tmp_path, "rebind", "doctor", "--json"))
    assert {finding["name"]: finding["ok"] for finding in report["findings"]}["edit and undo"]


@contextmanager
def studio(installed: Path, folder: Path, model: Path) -> Iterator[str]:
    """Run the installed studio, and yield its address."""
    words = [str(installed / "rebind"), "studio", "--quiet", "--no-open", "--port", "0", "--model", str(model)]
    with subprocess.Popen(words, cwd=folder, env=places(folder), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def fetch(address: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(address, data, {"Content-Type": "application/json"})) as answer:
        return answer.read()


def test_the_installed_studio_has_its_page_and_edits_a_model(installed, tmp_path):
    tiny.llama().save_pretrained(tmp_path / "tiny")
    tiny.tokenizer().save_pretrained(tmp_path / "tiny")
    static = ROOT / "rebind" / "studio" / "static"
    with studio(installed, tmp_path, tmp_path / "tiny") as page:
        assert fetch(page) == (static / "index.html").read_bytes()
        for file in static.iterdir():
            assert fetch(f"{page}static/{file.name}") == file.read_bytes()
        fact = {"sentence": "The capital of {France} is", "target": "Rome", "force": True}
        job = json.loads(fetch(f"{page}api/edit/write", fact))
        while job["status"] in ("waiting", "running"):
            job = json.loads(fetch(f"{page}api/jobs/{job['id']}?after={job['version']}"))
    assert job["status"] == "done", job["error"]
    assert job["result"]["after"]["target"] > job["result"]["before"]["target"]


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel(installed, tmp_path):
    report = json.loads(run(installed, tmp_path, "rebind", "demo", "--json", timeout=1800))
    assert [fact["says_now"] for fact in report["facts"]] == [fact["target"] for fact in report["facts"]]
    assert report["undone"]["edited"][0] == report["undone"]["base"][0]
    assert report["undone"]["edited"][1] != report["undone"]["base"][1]
    assert report["memory"]["largest_difference"] < 1e-3
