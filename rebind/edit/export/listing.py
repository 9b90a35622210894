"""What an export wrote: a list of its files, and so which files of a folder are somebody else's.

A folder without a list is of an earlier version if its card is ours, or somebody else's. A file that is not on the
list, or has changed since, is somebody else's too.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from rebind.files import BLOCK, is_file, sampled, without_temporary, write_atomically

LIST = ".rebind-export"  # the other files of the folder by name, each with its seals; by name alone in earlier versions
STEP, WHOLE = 2**20, 2**24  # bytes: of a file of more than WHOLE a seal reads a block in each step
CARD, CARD_LINES = "README.md", ("\n- rebind\n", "\n- Fingerprint of the base: `")
NUMBER = "[0-9]" * 5
BESIDES = (CARD, "delta.safetensors")
EARLIER = {  # what exports without a list wrote, by their mark
    "adapter_config.json": ("adapter_config.json", "adapter_model.safetensors", *BESIDES),
    "config.json": (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        f"model-{NUMBER}-of-{NUMBER}.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "additional_chat_templates/*.jinja",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "spiece.model",
        "sentencepiece.bpe.model",
        *BESIDES,
    ),
}


def write_list(folder: Path) -> None:
    """Of all that is in it now."""
    (folder / LIST).write_bytes(_written({name: _seals(folder / name) for name in _files(folder)}))


def add_to_list(file: Path, data: bytes) -> None:
    """A file that is about to be put into an export, or below it, belongs to it and is replaced with it.

    The list is written first: if the process is killed before the file is, the one that was there still belongs to it.
    """
    file = file.resolve()
    folder = next((folder for folder in file.parents if is_file(folder / LIST)), None)
    if folder is None:
        return
    name, listed = file.relative_to(folder).as_posix(), _listed(folder)
    seals = [_seal(io.BytesIO(data))]
    if name in listed and file.is_file() and _as_written(file, listed[name]):
        seals += _seals(file) or []
    write_atomically(folder / LIST, _written({**listed, name: seals}))


def own_files(path: Path, mark: str) -> Mapping[str, list[str] | None]:
    """The files of a folder that an export wrote, as in its list; none, if no export wrote it."""
    if (path / LIST).is_file():
        return {LIST: None, **_listed(path)}
    card = path / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    if not all(line in text for line in CARD_LINES):
        return {}
    return {name: None for name in _files(path) if any(fnmatchcase(name, known) for known in EARLIER[mark])}


def other_files(path: Path, own: Mapping[str, list[str] | None]) -> list[str]:
    """Its files that no export wrote, or not as they are now; but not what a killed writer of its own has left."""
    others = []
    for name in _files(path):
        if name not in own:
            others += [name] if without_temporary(name) not in own else []
        elif not _as_written(path / name, own[name]):
            others.append(f"{name} (changed since)")
    return others


def _files(path: Path) -> list[str]:
    """All files in it and below, links too."""
    found = (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    return sorted(file.relative_to(path).as_posix() for file in found)


def _listed(path: Path) -> dict[str, list[str] | None]:
    text = (path / LIST).read_text(encoding="utf-8", errors="replace")
    try:
        listed = json.loads(text)
    except ValueError:
        listed = None
    return listed if isinstance(listed, dict) else dict.fromkeys(text.splitlines())


def _written(listed: Mapping[str, list[str] | None]) -> bytes:
    return json.dumps(listed, indent=1, sort_keys=True).encode()


def _as_written(file: Path, seals: list[str] | None) -> bool:
    """Whether a file has one of these seals; without any, its name is all that is known of it."""
    if seals is None:
        return True
    try:
        return any(seal in seals for seal in _seals(file) or [])
    except OSError:  # it cannot be read, and an export's files can
        return False


def _seals(file: Path) -> list[str] | None:
    """A file's seal, alone; None of what is no file."""
    if not file.is_file():
        return None
    with file.open("rb", buffering=0) as opened:
        return [_seal(opened)]


def _seal(opened: BinaryIO | io.FileIO) -> str:
    """Size and sha256. Of a large file it reads 4 KiB in each MiB, so a matrix of a MiB cannot change unseen.

    To read all of it would make an export markedly slower; a file's time changes when it is copied.
    """
    size = opened.seek(0, os.SEEK_END)
    starts = (*range(0, size, BLOCK if size <= WHOLE else STEP), max(0, size - BLOCK))
    return f"{size} {sampled(opened, starts)}"
