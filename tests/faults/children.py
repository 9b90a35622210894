"""Run a function in a forked process that dies, or runs out of disk, at a chosen moment.

The parent has imported everything and built what it needs, so that a child costs milliseconds. The child counts its
calls that change files: through Python's audit events (open, rename, remove, mkdir, ...) and by wrapping `os.write` and
`os.fsync`, which have none. Writes inside of libraries that are no Python are not counted; kills at random moments and
limits on file sizes reach them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rebind.errors import RebindError

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGING = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.link", "os.symlink"}
NEED_SPACE = {"open", "os.mkdir", "os.write"}

PATIENCE = 5  # times the timeout, for a child that gets little of the processor

Acknowledge = Callable[[str], None]


@dataclass(frozen=True)
class Fault:
    """What happens to a child, and when."""

    kind: str = "none"  # "kill", "torn" (half a write, then death), "full" (from then on), "error" (once), "small"
    call: int = 0  # the number of the file-changing call; for "small", the largest size of a file in bytes
    seconds: float | None = None  # for "kill": at this moment instead

    def __str__(self) -> str:
        return f"{self.kind} at {self.call if self.seconds is None else f'{self.seconds:.3f} s'}"


@dataclass(frozen=True)
class Ending:
    """How a child ended, and what it said before."""

    status: str  # "finished", "refused" (with an error of rebind), "crashed" (with any other), "killed", "stuck"
    value: Any = None  # what the function returned
    problem: str = ""  # the error
    acknowledged: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)  # names of the calls that changed files
    followed: list[str] = field(default_factory=list)  # symbolic links inside the home that were opened
    seconds: float = 0.0
    peak: int = 0  # bytes of memory, at most


class Calls:
    """The file-changing calls of this process below a folder. At the chosen one the fault happens."""

    def __init__(self, home: Path, fault: Fault) -> None:
        self.home, self.fault = os.path.realpath(home), fault
        self.names: list[str] = []
        self.followed: list[str] = []
        self.write, self.fsync = os.write, os.fsync

    def install(self) -> None:
        """Count from now on, to the end of the process: audit hooks cannot be removed."""
        sys.addaudithook(self._audit)
        os.write, os.fsync = self._write, self._fsync

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and self._is_inside(path):
                if flags & WRITING:
                    self.reach("open")
                self._note_link(path, flags)
        elif event in CHANGING and (self._is_inside(arguments[0]) or arguments[-1] not in (-1, None)):
            self.reach(event)

    def _note_link(self, path: Any, flags: int) -> None:
        """Note a path that leads out of the home through a symbolic link."""
        if isinstance(path, int) or (flags & os.O_NOFOLLOW and Path(os.fsdecode(path)).is_symlink()):
            return
        place = os.fsdecode(path)
        if not os.path.realpath(place).startswith(self.home):
            self.followed.append(place)

    def _is_inside(self, path: object) -> bool:
        if isinstance(path, int):
            return True  # a descriptor, which was opened inside
        return isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(self.home)

    def _write(self, handle: int, data: Any) -> int:
        if self.fault.kind == "torn" and len(self.names) + 1 == self.fault.call:
            self.write(handle, memoryview(data)[: len(data) // 2])
        self.reach("os.write")
        return self.write(handle, data)

    def _fsync(self, handle: int) -> None:
        self.reach("os.fsync")
        self.fsync(handle)

    def reach(self, name: str) -> None:
        """Count a call, and let the fault happen if this is its moment."""
        self.names.append(name)
        kind, number = self.fault.kind, len(self.names)
        if name == "acknowledge" and kind in ("full", "error"):
            return
        if kind in ("kill", "torn") and number == self.fault.call:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "error" and number == self.fault.call:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if kind == "full" and number >= self.fault.call > 0 and name in NEED_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def run_child(
    function: Callable[[Acknowledge], Any],
    home: Path,
    fault: Fault | None = None,
    *,
    timeout: float = 60.0,
    memory: int | None = None,
) -> Ending:
    """Run a function in a child and wait for its end; one that runs longer than `timeout` is killed.

    `memory` is the number of bytes that the child may allocate beyond what the parent has.
    """
    return Child(function, home, fault or Fault(), timeout, memory).wait()


class Child:
    """A child that is running; several of them may run at once."""

    def __init__(
        self,
        function: Callable[[Acknowledge], Any],
        home: Path,
        fault: Fault,
        timeout: float = 60.0,
        memory: int | None = None,
    ) -> None:
        self.fault, self.timeout, self.begin = fault, timeout, time.monotonic()
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.reader)
            _run(function, home, fault, writer, memory)
        os.close(writer)

    def wait(self) -> Ending:
        """Wait for the end of the child; kill it when its time has come."""
        moment = self.fault.seconds if self.fault.seconds is not None else self.timeout
        output, is_late = _read_until(self.reader, self.begin + moment)
        while is_late and self.fault.seconds is None and self._is_waiting_for_a_turn():
            more, is_late = _read_until(self.reader, time.monotonic() + 1.0)
            output += more
        if is_late:
            os.kill(self.pid, signal.SIGKILL)
            output += _read_until(self.reader, time.monotonic() + self.timeout)[0]
        os.close(self.reader)
        _, status, usage = os.wait4(self.pid, 0)
        seconds, peak = time.monotonic() - self.begin, usage.ru_maxrss * 1024
        is_stuck = is_late and self.fault.seconds is None
        return _ending(output, is_stuck, os.waitstatus_to_exitcode(status), seconds, peak)

    def _is_waiting_for_a_turn(self) -> bool:
        """Return whether the child would be done if the machine had nothing else to do."""
        is_young = time.monotonic() - self.begin < PATIENCE * self.timeout
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # not every system has it
            return False
        spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return is_young and spent < self.timeout / 2


def _ending(output: bytes, is_stuck: bool, exit_code: int, seconds: float, peak: int) -> Ending:
    messages = [json.loads(line) for line in output.split(b"\n")[:-1]]
    acknowledged = [one["acknowledged"] for one in messages if "acknowledged" in one]
    last = messages[-1] if messages and "status" in messages[-1] else {"status": "stuck" if is_stuck else "killed"}
    if last["status"] == "killed" and exit_code != -signal.SIGKILL:
        last = {"status": "crashed", "problem": f"The process ended with code {exit_code} and said nothing"}
    return Ending(**last, acknowledged=acknowledged, seconds=seconds, peak=peak)


def _read_until(reader: int, deadline: float) -> tuple[bytes, bool]:
    """Read all that a child writes; return early if that takes until the deadline."""
    output = b""
    while (left := deadline - time.monotonic()) > 0:
        if select.select([reader], [], [], left)[0]:
            if not (piece := os.read(reader, 1 << 16)):
                return output, False
            output += piece
    return output, True


def _run(function: Callable[[Acknowledge], Any], home: Path, fault: Fault, pipe: int, memory: int | None) -> None:
    """Do the work of a child. It never returns, and no handler of the parent runs at its end."""
    calls = Calls(home, fault)

    def send(**message: Any) -> None:
        calls.write(pipe, json.dumps(message).encode() + b"\n")

    def acknowledge(text: str) -> None:
        calls.reach("acknowledge")  # so that one kill comes after the last call and before the acknowledgment
        send(acknowledged=text)

    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        if memory is not None:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        if fault.kind == "small":
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault.call, fault.call))
        calls.install()
        value = function(acknowledge)
        send(status="finished", value=value, calls=calls.names, followed=calls.followed)
    except RebindError as problem:
        text = f"{type(problem).__name__} {problem.code}: {problem}"
        send(status="refused", problem=text, calls=calls.names, followed=calls.followed)
    except BaseException:
        with contextlib.suppress(BaseException):
            send(status="crashed", problem=traceback.format_exc(limit=-6), followed=calls.followed)
    finally:
        os._exit(0)
