"""Stored files that were damaged or forged: flipped bits, missing parts, exchanged files, links, forged fields.

Whatever happens to a file, a reader gets what was stored, makes it anew, or gets an error of rebind. No file outside
the folder is read or written through a link.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rebind.edit.ledger.log import HEADER, LOG, chain_lines, digest_of
from rebind.storage.seals import SEAL, check_line, seal_json, seal_line
from tests.faults.artifacts import Artifact, all_artifacts
from tests.faults.children import Ending, run_child

TIMEOUT, MEMORY = 40.0, 4 << 30
SECRET = b"a file of the reader's own\n"
NESTED = "[" * 50_000 + "]" * 50_000
BAD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**30, 1e308, "", "x" * 5_000, "../../outside", "/etc/passwd", "\x1b[2J", [], {}, [None],
    {"a": {"b": []}}, 99_999_999_999,
)  # fmt: skip


@dataclass(frozen=True)
class Built:
    """An artifact as it was stored."""

    name: str
    prepared: Path
    value: str  # what a reader gets


def build(name: str, scratch: Path) -> Built:
    """Store an artifact, and read it undisturbed."""
    artifact = all_artifacts()[name]
    prepared, home = scratch / "built" / name, scratch / "read" / name
    prepared.mkdir(parents=True)
    _finished(run_child(lambda _: artifact.build(prepared) and None, prepared, timeout=TIMEOUT), f"build {name}")
    shutil.copytree(prepared, home, symlinks=True)
    reading = run_child(lambda _: artifact.read(home), home, timeout=TIMEOUT, memory=MEMORY)
    return Built(name, prepared, _finished(reading, f"read {name}").value)


def _finished(ending: Ending, what: str) -> Ending:
    if ending.status != "finished":
        raise RuntimeError(f"{what} {ending.status} without any fault: {ending.problem}")
    return ending


def plan(built: list[Built], per_artifact: int, seed: int) -> list[tuple[Built, int]]:
    """Return the tamperings to try, each with a seed of its own, in random order."""
    draw = random.Random(seed)
    faults = [(one, draw.randrange(10**6)) for one in built for _ in range(per_artifact)]
    draw.shuffle(faults)
    return faults


def try_tampering(one: Built, seed: int, scratch: Path) -> tuple[str, str, list[tuple[str, str]]]:
    """Tamper once; return what was done, how the reader ended, and what is wrong with that."""
    artifact = all_artifacts()[one.name]
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        home, outside = Path(folder) / "home", Path(folder) / "outside"
        shutil.copytree(one.prepared, home, symlinks=True)
        outside.mkdir()
        (outside / "secret").write_bytes(SECRET)
        done = tamper(artifact, home, outside, draw)
        before = _contents(outside)
        ending = run_child(lambda _: _read(artifact, home), home, timeout=TIMEOUT, memory=MEMORY)
        problems = _judge(artifact, one, ending, is_forged=done.startswith("forge"))
        if _contents(outside) != before:
            problems.append(("corrupted", "a file outside was changed"))
    return f"{one.name} {seed}: {done}", ending.status, [(verdict, f"{done}: {text}") for verdict, text in problems]


def _read(artifact: Artifact, home: Path) -> dict[str, Any]:
    reported = artifact.reported(home)
    return {"value": artifact.read(home), "reported": reported}


def _judge(artifact: Artifact, one: Built, ending: Ending, *, is_forged: bool) -> list[tuple[str, str]]:
    """Return what is wrong. A forger can write anything with matching digests, but nothing that breaks the reader."""
    problems = []
    if ending.status == "stuck":
        problems.append(("stuck", f"no end within {TIMEOUT:g} s"))
    elif ending.status in ("crashed", "killed"):
        problems.append(("traceback", ending.problem))
    elif ending.status == "refused" and " internal_error:" in ending.problem:
        problems.append(("unclear", ending.problem))
    elif ending.status == "finished" and not (is_forged or _is_right(artifact, one, ending.value)):
        problems.append(("silent", "a reader gets something else and no error"))
    if ending.followed and not artifact.is_model:
        problems.append(("corrupted", f"a link that leads outside was followed: {ending.followed[0]}"))
    return problems


def _is_right(artifact: Artifact, one: Built, result: dict[str, Any]) -> bool:
    """Return whether a reader got what was stored, or could have known that it was damaged."""
    return artifact.is_model or bool(result["reported"]) or result["value"] == one.value


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


# Ways to tamper


def tamper(artifact: Artifact, home: Path, outside: Path, draw: random.Random) -> str:
    """Change one thing about an artifact; return what."""
    folders = [home / name for name in artifact.under]
    files = sorted(file for folder in folders for file in folder.rglob("*") if file.is_file())
    file, way = draw.choice(files), draw.choice(list(WAYS))
    if way == "link-folder" and file.parent in folders:
        way = "link"  # such a folder itself may be a link
    name = str(file.relative_to(home))
    return f"{way} {name}{WAYS[way](file, files, outside, draw)}"


def _flip(file: Path, files: list[Path], outside: Path, draw: random.Random) -> str:
    data = bytearray(file.read_bytes() or b"\0")
    at, bit = draw.randrange(len(data)), draw.randrange(8)
    data[at] ^= 1 << bit
    file.write_bytes(data)
    return f" at byte {at}, bit {bit}"


def _truncate(file: Path, files: list[Path], outside: Path, draw: random.Random) -> str:
    data = file.read_bytes()
    size = draw.randrange(len(data) + 1)
    file.write_bytes(data[:size])
    return f" to {size} of {len(data)} bytes"


def _empty(file: Path, files: list[Path], outside: Path, draw: random.Random) -> str:
    file.write_bytes(b"")
    return ""


def _delete(file: Path, files: list[Path], outside: Path, draw: random.Random) -> str:
    file.unlink()
    return ""


def _append(file: Path, files: list[Path], outside: Path, draw: random.Random) -> str:
    file.write_bytes(file.read_bytes() + draw.choice([b"\n", b"{}\n", b"null\n", draw.randbytes(40), b"\xff" * 9]))
    return ""


def _zero(file: Path, files: list[Path], outside: Path, draw: random.Random) -> str:
    data = bytearray(file.read_bytes())
    at = draw.randrange(len(data) + 1)
    data[at : at + 64] = bytes(len(data[at : at + 64]))
    file.write_bytes(data)
    return f" from byte {at}"


def _swap(file: Path, files: list[Path], outside: Path, draw: random.Random) -> str:
    other = draw.choice([one for one in files if one.suffix == file.suffix] or files)
    one, two = file.read_bytes(), other.read_bytes()
    file.write_bytes(two)
    other.write_bytes(one)
    return f" with {other.name}"


def _link(file: Path, files: list[Path], outside: Path, draw: random.Random) -> str:
    """Put a link in the place of a file: to its own content outside, or to a file of the reader's own."""
    target = outside / draw.choice(["moved", "secret"])
    if target.name == "moved":
        shutil.copy(file, target)
    file.unlink()
    file.symlink_to(target)
    return f" to {target.name}"


def _link_folder(file: Path, files: list[Path], outside: Path, draw: random.Random) -> str:
    """Put a link in the place of the folder of a file, to the same content outside."""
    folder = file.parent
    folder.rename(outside / "folder")
    folder.symlink_to(outside / "folder")
    return f" → folder {folder.name}"


def _folder(file: Path, files: list[Path], outside: Path, draw: random.Random) -> str:
    file.unlink()
    file.mkdir()
    return " by a folder"


def _nest(file: Path, files: list[Path], outside: Path, draw: random.Random) -> str:
    file.write_text(draw.choice([NESTED, f'{{"a": {NESTED}}}', f"{NESTED}\n{NESTED}\n"]))
    return ""


def _forge(file: Path, files: list[Path], outside: Path, draw: random.Random) -> str:
    """Replace one field of a JSON file, and correct all digests, as somebody with bad intentions would."""
    if file.name == LOG and (file.parent / HEADER).exists():
        return _forge_ledger(file, draw)
    try:
        if file.suffix == ".jsonl":
            return _forge_rows(file, draw)
        document = json.loads(file.read_bytes())
    except ValueError:
        return _flip(file, files, outside, draw)
    changed, what = _replace_leaf(document, draw)
    if isinstance(changed, dict) and SEAL in changed:
        changed = seal_json({name: value for name, value in changed.items() if name != SEAL})
    if file.name == HEADER and isinstance(changed, dict):
        changed = {name: value for name, value in changed.items() if name != "digest"}
        changed["digest"] = digest_of(changed)
    file.write_text(json.dumps(changed))
    return what


def _forge_ledger(file: Path, draw: random.Random) -> str:
    events = [json.loads(line) for line in file.read_bytes().splitlines()]
    for event in events:
        event.pop("line")
    index = draw.randrange(len(events))
    events[index], what = _replace_leaf(events[index], draw)
    digest = json.loads((file.parent / HEADER).read_bytes())["digest"]
    if all(isinstance(event, dict) for event in events):
        file.write_bytes(b"".join(chain_lines(events, digest)))
    return f" line {index + 1}{what}"


def _forge_rows(file: Path, draw: random.Random) -> str:
    first = zlib.crc32(file.name.encode())
    checksum, rows = first, []
    for line in file.read_bytes().splitlines():
        content, checksum = check_line(line, checksum)
        rows.append(json.loads(content))
    index = draw.randrange(len(rows))
    rows[index], what = _replace_leaf(rows[index], draw)
    checksum, lines = first, []
    for row in rows:
        line = seal_line(json.dumps(row), checksum)
        checksum = int(line[-10:-2], 16)
        lines.append(line)
    file.write_text("\n".join(lines) + "\n")
    return f" line {index + 1}{what}"


def _replace_leaf(document: Any, draw: random.Random) -> tuple[Any, str]:
    """Return a JSON value with one part replaced, and which."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, part in items:
            places.append((value, key))
            walk(part)

    walk(document)
    if not places:
        return draw.choice(BAD_VALUES), ""
    holder, key = draw.choice(places)
    holder[key] = draw.choice(BAD_VALUES)
    return document, f" {key} = {str(holder[key])[:20]!r}"


Way = Callable[[Path, list[Path], Path, random.Random], str]
WAYS: dict[str, Way] = {
    "flip": _flip,
    "truncate": _truncate,
    "empty": _empty,
    "delete": _delete,
    "append": _append,
    "zero": _zero,
    "swap": _swap,
    "link": _link,
    "link-folder": _link_folder,
    "replace": _folder,
    "nest": _nest,
    "forge": _forge,
}
