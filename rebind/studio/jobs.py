"""One worker thread that runs all work on a model, one job after another.

A model and its ledger have one state, so two jobs at once would see each other's half-finished work. Whoever clicks,
in whichever browser tab, gets a place in this queue.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from rebind.errors import UnknownNameError
from rebind.studio.replies import describe

Status: TypeAlias = Literal["waiting", "running", "done", "failed", "cancelled"]
Result = TypeVar("Result")
POLL = 0.05  # seconds between looks at whether somebody cancelled
MAX_FINISHED = 200  # finished jobs whose results can still be read
MOST_STAGES = 50  # that a reply lists


class JobCancelledError(BaseException):
    """Somebody cancelled the job. Like KeyboardInterrupt it is no Exception, so that no rescue swallows it."""


@dataclass
class Job:
    """A piece of work with an id, whose stages and result can be read from any thread."""

    id: str
    name: str
    version: int = 0  # grows with every change, so that a client can wait for the next one
    status: Status = "waiting"
    stages: list[dict[str, Any]] = field(default_factory=list)  # each {text, seconds}
    fraction: float | None = None  # of the current stage
    data: Any = None  # what the job has published so far
    notes: list[str] = field(default_factory=list)  # warnings, as sentences
    result: Any = None
    error: dict[str, Any] | None = None
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    cancel_requested: bool = False
    is_committed: bool = False  # past the point where a cancel leaves everything as it was
    done: threading.Event = field(default_factory=threading.Event)
    _waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    @property
    def finished(self) -> bool:
        return self.status in ("done", "failed", "cancelled")

    def update(self, **changes: Any) -> None:
        """Change some fields, and wake whoever waits for a change."""
        with self._mutex:
            for name, value in changes.items():
                setattr(self, name, value)
            self.version += 1
            self.seconds = time.monotonic() - self.started
            waiters, self._waiters = self._waiters, []
            if self.finished:
                self.done.set()
        for loop, event in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    async def wait(self, after: int, timeout: float) -> None:
        """Wait until the version is greater than `after`, the job is finished, or `timeout` seconds have passed."""
        event = asyncio.Event()
        with self._mutex:
            if self.version > after or self.finished:
                return
            self._waiters.append((asyncio.get_running_loop(), event))
        try:
            await asyncio.wait_for(event.wait(), timeout)
        except TimeoutError:
            return

    def to_json(self) -> dict[str, Any]:
        """Return what a client sees."""
        with self._mutex:
            names = ("id", "name", "version", "status", "fraction", "data", "notes", "result", "error", "is_committed")
            shown: dict[str, Any] = {name: getattr(self, name) for name in names}
            return {**shown, "stages": self.stages[-MOST_STAGES:], "seconds": round(self.seconds, 2)}


class JobControl:
    """What a job's function gets: a way to report its stages, and to end when it was cancelled."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.abandoned: threading.Thread | None = None  # what a cancelled job left behind

    def stage(self, text: str, fraction: float | None = None) -> None:
        """Report what the job is doing, and which fraction of this stage is done; end here if it was cancelled."""
        self.raise_if_cancelled()
        stages = self._job.stages
        if not stages or stages[-1]["text"] != text:
            now = time.monotonic() - self._job.started
            stages = [*stages, {"text": text, "seconds": round(now, 2)}]
        self._job.update(stages=stages, fraction=fraction)

    def publish(self, data: Any) -> None:
        """Show intermediate results, such as the points of a curve so far: JSON that replaces the last one."""
        self.raise_if_cancelled()
        self._job.update(data=data)

    def note(self, text: str) -> None:
        """Tell the user something besides the result."""
        if text not in self._job.notes:
            self._job.update(notes=[*self._job.notes, text])

    def commit(self) -> None:
        """Declare that what the job was for has happened: from here on it cannot be cancelled."""
        self._job.update(is_committed=True)

    def abandonable(self, function: Callable[[], Result]) -> Result:
        """Run a function that has no stages in a thread of its own: a cancel ends the job at once.

        The function then runs on to its end, and its result is thrown away. No other job begins before that.
        """
        future: Future[Result] = Future()
        thread = threading.Thread(target=_complete, args=(future, function), name="studio-apart", daemon=True)
        thread.start()
        try:
            while _runs(thread):
                self.raise_if_cancelled()
            self.raise_if_cancelled()
        except JobCancelledError:
            self.abandoned = thread
            raise
        return future.result()

    def raise_if_cancelled(self) -> None:
        """Leave the job if somebody cancelled it."""
        if self._job.cancel_requested and not self._job.is_committed:
            raise JobCancelledError


Work: TypeAlias = Callable[[JobControl], Any]


def _complete(future: Future[Result], function: Callable[[], Result]) -> None:
    try:
        future.set_result(function())
    except BaseException as problem:
        future.set_exception(problem)


def _runs(thread: threading.Thread) -> bool:
    """Wait for a moment, and return whether a thread still runs."""
    thread.join(POLL)
    return thread.is_alive()


class JobQueue:
    """Jobs in the order in which they came, run by one thread that starts with the first of them."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._queue: queue.SimpleQueue[tuple[Job, Work] | None] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._count = 0
        self._abandoned: threading.Thread | None = None
        self._thread: threading.Thread | None = None

    def submit(self, name: str, work: Work) -> Job:
        """Add a job; `work` returns its result, as JSON."""
        with self._mutex:
            self._count += 1
            job = Job(f"j{self._count}", name)
            ahead = sum(not one.finished for one in self._jobs.values())
            if ahead:
                job.stages = [{"text": f"waiting for {ahead} other job{'s' if ahead > 1 else ''}", "seconds": 0.0}]
            self._jobs[job.id] = job
            self._forget_old()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="studio-worker", daemon=True)
                self._thread.start()
            self._queue.put((job, work))
        return job

    def get(self, id: str) -> Job:
        """Return the job with this id."""
        with self._mutex:
            if id not in self._jobs:
                raise UnknownNameError(f"There is no job {id}", code="unknown_job")
            return self._jobs[id]

    def cancel(self, id: str) -> Job:
        """Ask a job to end. One that waits ends at once, one that runs at its next stage or while it is abandonable."""
        job = self.get(id)
        with self._mutex:
            job.cancel_requested = True
            if job.status == "waiting":
                job.update(status="cancelled")
        return job

    def wait(self, id: str, timeout: float) -> Job:
        """Wait in this thread until a job is finished, or `timeout` seconds have passed, and return it."""
        job = self.get(id)
        job.done.wait(timeout)
        return job

    @property
    def unfinished(self) -> list[Job]:
        """The job that runs and those that wait."""
        with self._mutex:
            return [job for job in self._jobs.values() if not job.finished]

    def close(self) -> None:
        """Cancel everything, and wait until the worker has left the model in order."""
        for job in self.unfinished:
            self.cancel(job.id)
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _forget_old(self) -> None:
        done = [id for id, job in self._jobs.items() if job.finished]
        for id in done[: max(0, len(done) - MAX_FINISHED)]:
            del self._jobs[id]

    def _wait_for_abandoned(self, job: Job) -> None:
        """Wait, as long as this job is wanted, for what the job before it left behind."""
        if self._abandoned is None or not self._abandoned.is_alive():
            return
        job.update(stages=[{"text": "waiting for the canceled job to end", "seconds": 0.0}])
        while not job.finished and _runs(self._abandoned):
            pass

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            job, work = entry
            self._wait_for_abandoned(job)
            with self._mutex:
                if job.finished:
                    continue
                job.update(status="running", stages=[], fraction=None, started=time.monotonic())
            control = JobControl(job)
            try:
                job.update(result=work(control), status="done", fraction=1.0)
            except JobCancelledError:
                self._abandoned = control.abandoned
                job.update(status="cancelled")
            except BaseException as problem:  # whatever it is, the worker goes on with the next job
                job.update(error=describe(problem), status="failed")
