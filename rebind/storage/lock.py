"""One writer at a time: an exclusive lock on a file, between processes and between threads."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from rebind.errors import StorageError
from rebind.storage.atomic import make_folders
from rebind.storage.problems import storage_errors, symbolic_link_error

POLL_SECONDS = 0.02


@contextmanager
def lock(path: str | Path, timeout: float) -> Iterator[None]:
    """Hold the lock file `path`; wait at most `timeout` seconds, then raise StorageError with code "locked".

    Taking it again in the same thread is harmless. The system releases it when its process dies, however it dies.
    A symbolic link at `path` is refused. Readers need no lock, so they also work in folders they cannot write.
    """
    path = Path(path).absolute()
    if path.is_symlink():  # filelock refuses links as well, but not on every system
        raise symbolic_link_error(path)
    with storage_errors(path):
        make_folders(path.parent)
        file_lock = FileLock(path, is_singleton=True)  # one object per path is what makes it reentrant
        try:
            file_lock.acquire(timeout=max(timeout, 0.0), poll_interval=POLL_SECONDS)
        except Timeout:
            error = StorageError(
                f"{path.parent} is in use by another process",
                advice="Wait until it finishes, or stop it, then try again",
                code="locked",
            )
            error.errno = errno.EAGAIN
            raise error from None
    try:
        yield
    finally:
        file_lock.release()
