"""The processes of one command: join them, share work between them, and gather its results.

Processes must call these functions in the same order; each call carries a label, so that processes that are out of
step fail instead of waiting for each other or mixing up results. If a process ends, the others fail at their next call
with the code "process_lost".
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from rebind import errors
from rebind.errors import RebindError
from rebind.parallel.messages import pack, unpack

PATIENCE = timedelta(hours=2)  # of the others, while one process does something alone, such as tokenizing a large text
REPORTED = "rebind/reported"  # in the store of the processes: how many have an error to report
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The place of this process among the processes of a command."""

    rank: int = 0
    count: int = 1


_joined = Ranks()
_alone: ContextVar[bool] = ContextVar("_alone", default=False)


def join_processes(device: torch.device | str = "cpu") -> tuple[Any, torch.device]:
    """Join the processes that `torchrun` started, if any.

    They exchange tensors on the type of `device`. Returns accelerate's PartialState, and the device of this process.
    """
    global _joined
    from accelerate import PartialState  # type: ignore[import-untyped]

    usable = torch.device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return PartialState(), usable
    is_new = not distributed.is_initialized()
    processes = PartialState(cpu=usable.type == "cpu", timeout=PATIENCE)
    if is_new:
        atexit.register(processes.destroy_process_group)
        if threading.current_thread() is threading.main_thread():  # torchrun ends the others when one has died
            signal.signal(signal.SIGTERM, _interrupt)
    _joined = Ranks(processes.process_index, processes.num_processes)
    return processes, processes.device


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt  # as Ctrl-C, upon which everything saves what it has finished


def ranks() -> Ranks:
    """Return the place of this process among those that share the work; that of a single one unless they joined."""
    return Ranks() if _alone.get() else _joined


def is_writer() -> bool:
    """Return whether this process writes files and prints: one of them does."""
    return ranks().rank == 0


@contextmanager
def alone() -> Iterator[None]:
    """Run a block in which this process shares nothing with the others, each of which may do something else."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def local_device(name: str | None) -> str | None:
    """Return the device of this process: with several processes on a machine, each has a GPU of its own.

    >>> local_device("cpu")
    'cpu'
    """
    if name != "cuda" or ranks().count == 1:
        return name
    return f"cuda:{int(os.environ.get('LOCAL_RANK', ranks().rank)) % max(torch.cuda.device_count(), 1)}"


def share(items: Sequence[T]) -> list[T]:
    """Return the items of this process: every n-th one of n processes."""
    here = ranks()
    return list(items[here.rank :: here.count])


def unite(results: Sequence[Any]) -> list[Any]:
    """Return the results of all processes for the items that `share` gave them, in the order of the items."""
    if ranks().count == 1:
        return list(results)
    parts = gather(list(results), "unite")
    return [parts[index % len(parts)][index // len(parts)] for index in range(sum(map(len, parts)))]


def gather(value: Any, label: str = "gather") -> list[Any]:
    """Return the values of all processes, in their order; they consist of what `messages.pack` takes."""
    count = ranks().count
    if count == 1:
        return [value]
    message = pack(value)
    heads = [torch.zeros(2, dtype=torch.int64) for _ in range(count)]
    with _connected():
        distributed.all_gather(heads, torch.tensor([zlib.crc32(label.encode()), len(message)]))
        _require_in_step(label, [int(head[0]) for head in heads])
        sizes = [int(head[1]) for head in heads]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(message)] = message
        messages = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(messages, padded)
    return [unpack(one[:size]) for one, size in zip(messages, sizes, strict=True)]


def sum_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums of tensors over all processes, each of which has the same names and shapes, on the CPU."""
    if ranks().count == 1:
        return dict(tensors)
    gather(None, "sum " + ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()))
    totals = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with _connected():
        for total in totals.values():
            distributed.all_reduce(total)
    return totals


def from_writer(compute: Callable[[], T], label: str = "from_writer") -> T:
    """Return what `compute` returns in the writer, in every process; an error that it raises is raised in all.

    The others wait meanwhile. The result consists of what `messages.pack` takes.
    """
    if ranks().count == 1:
        return compute()
    value: Any = None
    problem: RebindError | None = None
    if is_writer():
        try:
            with alone():
                value = compute()
        except RebindError as raised:
            problem = raised
    outcome = gather({"value": value, "error": None if problem is None else _describe(problem)}, label)[0]
    if problem is not None:
        raise problem
    if outcome["error"] is not None:
        raise _restore(outcome["error"])
    return value if is_writer() else outcome["value"]


def should_report() -> bool:
    """Return whether this process reports its error: of all that fail, the first one does."""
    if _joined.count == 1:
        return os.environ.get("RANK", "0") == "0"
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        connect: Any = vars(distributed)["TCPStore"]  # untyped
        store = connect(address, port, is_master=False, timeout=timedelta(seconds=2))
        return bool(store.add(REPORTED, 1) == 1)
    except (RuntimeError, OSError, KeyError):  # the first process kept the store and is gone
        return _joined.rank <= 1


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as problem:  # also torch.distributed.DistBackendError
        raise RebindError(
            "Another process of this command has ended",
            advice="What was finished is stored: run the same command again to continue",
            code="process_lost",
        ) from problem


def _require_in_step(label: str, labels: Sequence[int]) -> None:
    if len(set(labels)) > 1:
        raise RebindError(
            f"The processes of this command are out of step at {label!r}",
            advice="Check that all of them run the same command on the same files",
            code="processes_out_of_step",
        )


def _describe(problem: RebindError) -> dict[str, Any]:
    fields = {name: getattr(problem, name) for name in ("problem", "expected", "advice", "code")}
    settings = {name: value if _is_plain(value) else str(value) for name, value in problem.settings.items()}
    return {**fields, "class": type(problem).__name__, "settings": settings, "checks": getattr(problem, "checks", ())}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list, tuple))


def _restore(fields: dict[str, Any]) -> RebindError:
    kind = getattr(errors, fields.pop("class"), RebindError)
    checks = fields.pop("checks")
    problem: RebindError = kind(fields.pop("problem"), **fields)
    if checks:
        with suppress(AttributeError):
            problem.checks = tuple(checks)  # type: ignore[attr-defined]
    return problem
