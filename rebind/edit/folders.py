"""Folders that replace an older one of their kind, and nothing else: filled beside it, then put in its place.

Each has a list of its files. A folder without one is of an earlier version if its card is ours, or somebody else's;
and a file that is not on the list is somebody else's too. Neither is ever replaced.

`rebind.files` writes folders that are new, and keeps one that is there.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors import SafetensorError

from rebind.errors import InputError, StorageError
from rebind.files import remove_stale, write_atomically, write_folder_atomically

LIST = ".rebind-export"  # the other files of the folder, a line each
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


def write_folder(path: Path, fill: Callable[[Path], None], mark: str, overwrite: bool) -> Path:
    """Fill a folder beside `path`, then put it in its place; until then what is there stays as it is."""

    def fill_and_list(target: Path) -> None:
        fill(target)
        (target / LIST).write_bytes(_lines(_files(target)))

    path = path.resolve()
    require_free(path, mark, overwrite)
    remove_stale(path.parent, f".{path.name}.*.new", f"..{path.name}.*.new.*.tmp")
    staged = path.with_name(f".{path.name}.{secrets.token_hex(6)}.new")
    try:
        write_folder_atomically(staged, fill_and_list)
        require_free(path, mark, overwrite)  # saving takes minutes: somebody may have come first
        _swap(staged, path)
    except (OSError, SafetensorError) as problem:
        number = getattr(problem, "errno", None)
        error = StorageError(
            f"cannot write {path} ({os.strerror(number) if number else problem}), expected a folder with room and "
            f"write access: free some space, or choose another folder"
        )
        error.errno = number
        raise error from problem
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return path


def require_free(path: Path, mark: str, overwrite: bool) -> None:
    """`mark` is a file that all of the kind that would replace it have."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir() or not (path / mark).is_file():
        raise _not_replaced(path)
    if not overwrite:
        raise InputError(f"{path} is not empty, expected a new or empty folder: choose another, or pass overwrite=True")
    own = _own(path, mark)
    if mark not in own:
        raise _not_replaced(path)
    if others := [name for name in _files(path) if name not in own]:
        raise InputError(
            f"{path} holds {_named(others)} besides an earlier export and is not replaced, expected only what an "
            f"export wrote: move {'it' if len(others) == 1 else 'them'} elsewhere, or choose another name"
        )


def add_to_list(file: Path) -> None:
    """A file that is put into an export afterwards belongs to it, and is replaced with it."""
    path = file.parent
    if (path / LIST).is_file():
        write_atomically(path / LIST, _lines({*_listed(path), file.name}))


def _not_replaced(path: Path) -> InputError:
    kind = "holds other things" if path.is_dir() else "is a file"
    return InputError(f"{path} {kind} and is not replaced, expected a new or empty folder: choose another name")


def _own(path: Path, mark: str) -> set[str]:
    """The files of a folder that an export wrote; none, if no export wrote it."""
    if (path / LIST).is_file():
        return {LIST, *_listed(path)}
    card = path / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    if not all(line in text for line in CARD_LINES):
        return set()
    return {name for name in _files(path) if any(fnmatchcase(name, known) for known in EARLIER[mark])}


def _files(path: Path) -> list[str]:
    """All files in it and below, links too."""
    found = (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    return sorted(file.relative_to(path).as_posix() for file in found)


def _listed(path: Path) -> list[str]:
    return (path / LIST).read_text(encoding="utf-8", errors="replace").splitlines()


def _lines(names: Collection[str]) -> bytes:
    return "".join(f"{name}\n" for name in sorted(names)).encode()


def _named(names: list[str]) -> str:
    """At most three of them.

    >>> _named(["a"]), _named(["a", "b", "c"]), _named(["a", "b", "c", "d", "e"])
    ('a', 'a, b and c', 'a, b, c and 2 more')
    """
    told = names if len(names) <= 3 else [*names[:3], f"{len(names) - 3} more"]
    return " and ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)


def _swap(staged: Path, path: Path) -> None:
    if not path.exists():
        staged.rename(path)
        return
    retired = staged.with_suffix(".old")
    path.rename(retired)
    try:
        staged.rename(path)
    except BaseException:
        retired.rename(path)
        raise
    shutil.rmtree(retired, ignore_errors=True)
