"""One writer at a time: a lock on a file, between processes and between threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rebind.edit.ledger.log import storage_error
from rebind.errors import LedgerError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


class Lock:
    """An exclusive lock on a file, between processes and between threads; taking it twice is harmless.

    The system drops it when its holder dies, however it dies, so there is no stale lock to clear away.
    """

    PLACE = 1 << 30  # the byte that Windows locks: far from the pid, which others must be able to read

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = threading.RLock()
        self._depth = 0
        self._handle = -1

    @contextlib.contextmanager
    def held(self, timeout: float) -> Iterator[None]:
        deadline = time.monotonic() + timeout
        if not self._thread.acquire(timeout=max(timeout, 0)):
            raise self._busy("another thread", timeout)
        try:
            if self._depth == 0:
                self._open(deadline, timeout)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._close()
        finally:
            self._thread.release()

    def _open(self, deadline: float, timeout: float) -> None:
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as problem:
            raise storage_error(self.path, problem) from problem
        try:
            while not self._try(handle):
                if time.monotonic() >= deadline:
                    raise self._busy(self._holder(), timeout)
                time.sleep(0.02)
            self._sign(handle, f"{os.getpid()}\n")
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle

    def _close(self) -> None:
        self._sign(self._handle, "")
        if sys.platform == "win32":
            os.lseek(self._handle, self.PLACE, os.SEEK_SET)
            msvcrt.locking(self._handle, msvcrt.LK_UNLCK, 1)
        os.close(self._handle)  # and with it goes the lock

    def _try(self, handle: int) -> bool:
        try:
            if sys.platform == "win32":
                os.lseek(handle, self.PLACE, os.SEEK_SET)
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as problem:
            raise storage_error(self.path, problem) from problem
        return True

    def _sign(self, handle: int, text: str) -> None:
        """Say who holds the lock. A courtesy: the lock holds without it."""
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.lseek(handle, 0, os.SEEK_SET)
            os.write(handle, text.encode())

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            if pid := self.path.read_text().strip():
                return f"process {pid}"
        return "another process"

    def _busy(self, holder: str, timeout: float) -> LedgerError:
        return LedgerError(
            f"{self.path.parent} is held by {holder}, waited {timeout:g} s: let it finish, or stop it, and try again"
        )
