"""Snapshots: results that can be computed again from the log and the base model, stored in a ledger to save time.

Nothing depends on them. A snapshot that is missing, damaged, too old or not made by this user is ignored, and any of
them may be deleted. The name of the file ends in a keyed digest of its content, and the key lies in the user's data
folder: a ledger may come from somebody else, and then its snapshots must not decide what is in the model.
"""

from __future__ import annotations

import hmac
import platform
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from rebind.errors import StorageError
from rebind.storage import data_dir, path_inside, write_file

FOLDER = "snapshots"
KEY_FILE, KEY_BYTES = "snapshots.key", 32
MAX_BYTES = 2**30  # of one kind of snapshot
WORTH_SECONDS = 0.1  # a snapshot that saves less is not written
READ_BYTES_PER_SECOND = 2e8  # an estimate, to know what a snapshot saves
PIECE = 2**20


class Snapshots:
    """The snapshots of one ledger, in kinds such as "state". No method raises if a file cannot be read or written."""

    def __init__(
        self, ledger: Path, *, worth_seconds: float = WORTH_SECONDS, max_bytes: int = MAX_BYTES, enabled: bool = True
    ) -> None:
        self.ledger, self.folder = ledger, ledger / FOLDER
        self.worth_seconds, self.max_bytes, self.enabled = worth_seconds, max_bytes, enabled

    def is_worth(self, seconds: float, size: int) -> bool:
        """Return whether to write a snapshot of so many bytes of what took so many seconds to compute."""
        if not self.enabled or size > self.max_bytes:
            return False
        return seconds >= self.worth_seconds + (2 * size / READ_BYTES_PER_SECOND if self.worth_seconds else 0.0)

    def names(self, kind: str) -> list[str]:
        """Return the names of the snapshots of a kind, unchecked, the newest last."""
        if not self.enabled or self.folder.is_symlink():
            return []
        with suppress(OSError):
            files = [file for file in self.folder.iterdir() if file.name.startswith(f"{kind}-")]
            return [file.name for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name))]
        return []

    def read(self, name: str) -> bytes | None:
        """Return the content of a snapshot, if this user wrote it as it is."""
        with suppress(OSError):
            file = self.folder / name
            if self._key is not None and not file.is_symlink():
                data = file.read_bytes()
                if hmac.compare_digest(name.rpartition("-")[2], self._sign([data])):
                    return data
        return None

    def read_tensors(self, name: str) -> dict[str, Tensor] | None:
        """Return the tensors of a snapshot, if this user wrote it as it is."""
        with suppress(OSError, SafetensorError, ValueError, RuntimeError):
            file = self.folder / name
            if self._key is not None and not file.is_symlink():
                with file.open("rb") as data:
                    signature = self._sign(iter(lambda: data.read(PIECE), b""))
                if hmac.compare_digest(name.rpartition("-")[2], signature):
                    return load_file(file)
        return None

    def write(self, kind: str, parts: Sequence[bytes | memoryview]) -> str | None:
        """Store a snapshot and return its name; None if that is not possible."""
        if not self.enabled or self._key is None:
            return None
        name = f"{kind}-{self._sign(parts)}"
        with suppress(StorageError, OSError):
            write_file(path_inside(self.ledger, f"{FOLDER}/{name}"), parts, flush=False)
            return name
        return None

    def write_tensors(self, kind: str, tensors: Mapping[str, Tensor]) -> str | None:
        """Store tensors as a snapshot."""
        return self.write(kind, [save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})])

    def remove(self, names: Iterable[str]) -> None:
        """Delete snapshots."""
        for name in names:
            with suppress(StorageError, OSError):
                path_inside(self.ledger, f"{FOLDER}/{name}").unlink(missing_ok=True)

    def replace(self, kind: str, name: str | None) -> None:
        """Delete the snapshots of a kind that an equally good one has replaced."""
        if name is not None:
            self.remove(other for other in self.names(kind) if other != name)

    def _sign(self, parts: Iterable[bytes | memoryview]) -> str:
        assert self._key is not None
        signature = hmac.new(self._key, digestmod="sha256")
        for part in parts:
            signature.update(part)
        return signature.hexdigest()

    @cached_property
    def _key(self) -> bytes | None:
        return user_key()


def user_key() -> bytes | None:
    """Return this user's key for snapshots, which is created on first use; None where none can be stored."""
    file = data_dir() / KEY_FILE
    with suppress(OSError, StorageError):
        if not file.exists() or file.stat().st_size != KEY_BYTES:
            write_file(file, secrets.token_bytes(KEY_BYTES))
            file.chmod(0o600)
        key = file.read_bytes()  # of two processes that create one at the same time, the last wins
        return key if len(key) == KEY_BYTES else None
    return None


def arithmetic(device: torch.device) -> str:
    """Return what the last bits of a sum depend on: a snapshot is used only where it would be computed alike."""
    threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{capability}, {threads} threads"
    return f"torch {torch.__version__}, {platform.machine()}, {device.type} {name}"
