"""A folder that one run owns and can resume: an evaluation, a training or an experiment."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rebind.errors import InputError
from rebind.storage.atomic import (
    TEMPORARY,
    make_folders,
    path_inside,
    read_json_object,
    remove_file,
    remove_temporaries,
    to_json,
    write_file,
    write_json,
)
from rebind.storage.jsonl import JsonLines
from rebind.storage.lock import lock
from rebind.storage.problems import storage_errors
from rebind.storage.seals import check_json, seal_json

RunKind: TypeAlias = Literal["evaluation", "training", "experiment"]

CONFIG, LOCK = "config.json", ".lock"


class RunFolder:
    """The folder of an active run. Open one with `RunFolder.open`, in a `with` statement."""

    def __init__(self, path: Path, config: dict[str, Any], resumed: bool) -> None:
        self.path = path
        self.config = config  # as stored: of a resumed run, the settings that it was started with
        self.resumed = resumed

    @classmethod
    @contextmanager
    def open(
        cls,
        path: str | Path,
        kind: RunKind,
        config: Mapping[str, Any],
        *,
        ignore: Collection[str] = (),
        overwrite: bool = False,
    ) -> Iterator[RunFolder]:
        """Start a run in a new or empty folder, or resume the run in it if its settings are the same.

        Args:
            path: the folder; created if it is missing, and removed if the body fails before it writes anything.
            kind: what kind of run this is; a folder with a run of another kind is refused.
            config: the settings, stored in config.json together with the kind and a digest.
            ignore: dotted names of settings that may differ when the run is resumed, such as "versions.torch".
            overwrite: start over where the settings differ; rows of the earlier run are removed.

        Raises:
            InputError: code "run_folder_differs", "run_config_damaged" or "not_a_run_folder".
            StorageError: code "locked" if another process uses the folder, or the reason why it cannot be written.
        """
        path = Path(path)
        wanted: dict[str, Any] = json.loads(to_json(config))
        with storage_errors(path):
            _stored_config(path, kind)  # a folder with other things in it does not even get a lock file
        make_folders(path)
        with lock(path / LOCK, timeout=0):
            for folder, _, _ in os.walk(path):
                remove_temporaries(folder)
            stored = _stored_config(path, kind)
            if stored is not None and (differences := _differences(stored, wanted, ignore)):
                if not overwrite:
                    raise _other_settings(path, differences)
                stored = None
            run = cls(path, stored or wanted, resumed=stored is not None)
            if not run.resumed:
                for rows in path.glob("*.jsonl"):
                    remove_file(rows)
                write_json(path / CONFIG, seal_json({"kind": kind, **wanted}))
            try:
                yield run
            except BaseException:
                if {entry.name for entry in path.iterdir()} <= {CONFIG, LOCK}:
                    shutil.rmtree(path, ignore_errors=True)
                raise

    @staticmethod
    def read_config(path: str | Path, kind: RunKind) -> dict[str, Any]:
        """Return the settings of the run in a folder, for readers; they need no lock and no write access."""
        stored = read_json_object(Path(path) / CONFIG) or {}
        if stored.get("kind") != kind:
            raise InputError(
                f"{path} holds no run of kind {kind!r}",
                expected="a new folder, or the folder of such a run",
                advice="Choose another folder for {out}",
                settings={"out": None},
                code="not_a_run_folder",
            )
        try:
            settings = check_json(stored)
        except ValueError as problem:
            raise InputError(
                f"{Path(path) / CONFIG} was altered ({problem})",
                advice="Restore the file, or choose another folder for {out}",
                settings={"out": None},
                code="run_config_damaged",
            ) from None
        del settings["kind"]
        return settings

    def file(self, name: str) -> Path:
        """Return the path of a file or folder to write; symbolic links on the way are refused."""
        return path_inside(self.path, name)

    def rows(self, name: str) -> JsonLines:
        """Return the rows in one of the folder's files, such as "records.jsonl"."""
        return JsonLines(self.file(name))

    def write(self, name: str, data: bytes) -> None:
        """Write one of the folder's files atomically."""
        write_file(self.file(name), data)


def _stored_config(path: Path, kind: RunKind) -> dict[str, Any] | None:
    """Return the settings of the run in a folder; None if a run can start there; raise if it holds other things."""
    if not path.exists():
        return None
    if path.is_dir() and all(entry.name == LOCK or TEMPORARY.fullmatch(entry.name) for entry in path.iterdir()):
        return None
    return RunFolder.read_config(path, kind)


def _other_settings(path: Path, differences: Mapping[str, tuple[Any, Any]]) -> InputError:
    changes = ", ".join(f"{name} (was {old!s:.32}, now {new!s:.32})" for name, (old, new) in differences.items())
    return InputError(
        f"{path} holds a run with other settings: {changes}",
        advice="Use the same settings to resume that run, or choose another folder for {out}",
        settings={"out": None},
        code="run_folder_differs",
    )


def _differences(
    stored: Mapping[str, Any], config: Mapping[str, Any], ignore: Collection[str]
) -> dict[str, tuple[Any, Any]]:
    """Return the old and the new value of every setting that differs, by dotted name."""
    old, new = flatten(stored, ignore), flatten(config, ignore)
    return {name: (old.get(name), new.get(name)) for name in old | new if old.get(name) != new.get(name)}


def flatten(config: Mapping[str, Any], ignore: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Return settings in nested dictionaries by dotted names, except those in `ignore`.

    >>> flatten({"seed": 0, "model": {"name": "x", "dtype": "y"}}, ignore=["model.dtype"])
    {'seed': 0, 'model.name': 'x'}
    """
    settings: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if name not in ignore:
            settings |= flatten(value, ignore, f"{name}.") if isinstance(value, dict) else {name: value}
    return settings
