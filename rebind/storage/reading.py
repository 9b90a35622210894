"""Open files for reading without following symbolic links: a folder from somebody else must not name files of ours."""

from __future__ import annotations

import io
import os
from pathlib import Path

from rebind.storage.problems import symbolic_link_error


def open_to_read(path: str | Path) -> io.BufferedReader:
    """Open a file; raise StorageError with code "symbolic_link" if there is a symbolic link in its place."""
    path = Path(path)
    if path.is_symlink():
        raise symbolic_link_error(path)
    no_link = getattr(os, "O_NOFOLLOW", 0)  # a link that appears just now is refused as well
    return os.fdopen(os.open(path, os.O_RDONLY | no_link | getattr(os, "O_BINARY", 0)), "rb")


def read_file(path: str | Path) -> bytes:
    """Return the content of a file, which must not be a symbolic link."""
    with open_to_read(path) as file:
        return file.read()
