"""One process or several, as `torchrun` starts them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed

from rebind.errors import InputError, RebindError
from rebind.files import require_writable

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

Made = TypeVar("Made")
PATIENCE = timedelta(hours=2)  # that the others have while the first reads a large corpus
LOCK = ".lock"


@dataclass(frozen=True)
class Processes:
    """Which process this is, of how many, and where it computes."""

    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the processes, the same in each."""
        if self.count > 1:
            value = value.clone()
            distributed.all_reduce(value)
            value = value / self.count
        return value

    def gathered(self, value: Tensor) -> Tensor | None:
        """Every process's tensor in the first one, [count, ...]; None in the others."""
        if self.count == 1:
            return value.detach().cpu().unsqueeze(0)
        here = value.detach().to(self.device).contiguous()
        parts = [torch.empty_like(here) for _ in range(self.count)] if self.first else None
        distributed.gather(here, parts)
        return None if parts is None else torch.stack(parts).cpu()

    def after_the_first(self, make: Callable[[], Made]) -> Made:
        """What `make` makes, in the first process before the others: they find it on disk. All fail if it does."""
        if self.count == 1:
            return make()
        problem: Exception | None = None
        made: Made | None = None
        if self.first:
            try:
                made = make()
            except Exception as raised:
                problem = raised
        failed = torch.tensor(float(problem is not None), device=self.device)
        distributed.broadcast(failed, 0)
        if problem is not None:
            raise problem
        if failed.item():
            raise RebindError("the first process could not go on: it says why")
        return cast(Made, made) if self.first else make()

    def as_the_first(self, flag: bool) -> bool:
        """What the first process says, in all of them."""
        if self.count == 1:
            return flag
        said = torch.tensor(float(flag), device=self.device)
        distributed.broadcast(said, 0)
        return bool(said.item())

    def wait(self) -> None:
        if self.count > 1:
            distributed.barrier()


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """The processes that `torchrun` started, or this one alone."""
    count, rank = (_number(name, default) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    try:
        place = torch.device(device)
        if place.type == "cuda" and count > 1:
            place = torch.device("cuda", _number("LOCAL_RANK", 0))
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as problem:
        line = str(problem).strip().splitlines()[0]
        raise InputError(
            f"device {device!r} cannot be used here ({line}), expected cpu, cuda or mps: try cpu"
        ) from None
    if count == 1:
        yield Processes(0, 1, place)
        return
    owned = not distributed.is_initialized()
    if owned:
        backend = "nccl" if place.type == "cuda" else "gloo"
        distributed.init_process_group(backend, rank=rank, world_size=count, timeout=PATIENCE)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    try:
        yield Processes(rank, count, place)
    finally:
        if owned:
            distributed.destroy_process_group()


@contextmanager
def alone(folder: Path, group: Processes) -> Iterator[None]:
    """Nobody else trains into this folder meanwhile. The lock goes with the process, however that ends.

    A folder that was made for it and got nothing else, because the run was refused, goes too.
    """
    with ExitStack() as held:

        def take() -> None:
            if group.first and fcntl is not None:
                require_writable(folder, "choose another folder")
                new = not folder.exists()
                folder.mkdir(parents=True, exist_ok=True)
                file = held.enter_context((folder / LOCK).open("w"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise InputError(
                        f"another process trains into {folder}: wait for its end, or choose another folder"
                    ) from None
                if new:
                    held.callback(_remove_if_bare, folder)  # while the lock is still held

        group.after_the_first(take)
        yield


def _remove_if_bare(folder: Path) -> None:
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            folder.rmdir()


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise InputError(
            f"{name} is {text!r}, expected the number that torchrun sets: start with torchrun, or unset it"
        )
    return int(text)
