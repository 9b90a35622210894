"""Python in another process, to be killed, to run out of disk, or to hold a lock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PRELUDE = """
import os, signal, sys
from pathlib import Path
from rebind.errors import RebindError
from rebind.storage import *
folder = Path(sys.argv[1])
"""


def start(code: str, folder: Path, *before: str) -> subprocess.Popen[str]:
    """Run code that begins with the prelude; `before` is a command that starts it."""
    command = [*before, sys.executable, "-c", PRELUDE + code, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def output_of(code: str, folder: Path, *before: str) -> str:
    """Return what the code printed; it must end by itself."""
    with start(code, folder, *before) as process:
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    return printed.strip()


@contextmanager
def running(code: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the code from its first printed line on; kill it at the end."""
    with start(code, folder) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def small_disk(folder: Path) -> tuple[str, ...]:
    """Return a command that runs what follows with a disk of 64 KiB at `folder`; skip where that is not possible."""
    mount = f"mount -t tmpfs -o size=64k none {folder}"
    command = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    try:
        possible = subprocess.run([*command, mount], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("this system mounts no disks for ordinary users")
    return (*command, f'{mount} && exec "$@"', "sh")
