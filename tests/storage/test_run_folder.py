"""Folders that one run owns and can resume."""

from __future__ import annotations

import json

import pytest

from rebind.errors import InputError, StorageError
from rebind.storage import JsonLines, RunFolder
from tests.storage.processes import running
from tests.support import raises

CONFIG = {"method": "memit", "layers": (3, 4), "versions": {"torch": "2.6", "python": "3.11"}, "lam": None}


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def open_run(path, config=CONFIG, kind="evaluation", **options):
    return RunFolder.open(path, kind, config, **options)


def test_a_run_starts_and_is_resumed(tmp_path):
    with open_run(tmp_path / "deep" / "run") as run:
        assert not run.resumed
        run.rows("rows.jsonl").append({"n": 1})
        run.write("figures/a.png", b"png")
        assert run.path == tmp_path / "deep" / "run"
    with open_run(tmp_path / "deep" / "run") as run:
        assert run.resumed
        assert run.rows("rows.jsonl").read() == [{"n": 1}]
        assert run.config == json.loads(json.dumps(CONFIG))
        assert run.file("figures/a.png").read_bytes() == b"png"
    assert RunFolder.read_config(tmp_path / "deep" / "run", "evaluation") == run.config


def test_other_settings_are_refused_and_named(tmp_path):
    with open_run(tmp_path / "run") as run:
        run.rows("rows.jsonl").append({"n": 1})
    other = {**CONFIG, "layers": [3], "versions": {"torch": "2.7", "python": "3.11"}}
    with raises(InputError, "run_folder_differs") as caught, open_run(tmp_path / "run", other):
        pass
    assert all(name in caught.value.problem for name in ("layers", "versions.torch"))
    assert "python" not in caught.value.problem
    for ignore in (["layers", "versions.torch"], ["layers", "versions"]):
        with open_run(tmp_path / "run", other, ignore=ignore) as run:
            assert run.resumed
            assert run.config["layers"] == [3, 4]  # what the run was started with


def test_a_run_starts_over_on_request(tmp_path):
    with open_run(tmp_path / "run") as run:
        run.rows("rows.jsonl").append({"n": 1})
        run.write("notes.txt", b"precious")
    with open_run(tmp_path / "run", overwrite=True) as run:
        assert run.resumed  # the settings are the same: nothing to start over
    with open_run(tmp_path / "run", {"method": "rome"}, overwrite=True) as run:
        assert not run.resumed
        assert run.rows("rows.jsonl").read() == []
        assert run.config == {"method": "rome"}
    assert RunFolder.read_config(tmp_path / "run", "evaluation") == {"method": "rome"}
    assert "notes.txt" in names(tmp_path / "run")


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": "precious"},
        {"config.json": '{"model_type": "gpt2"}'},
        {"config.json": '{"kind": "training"}'},
        {"config.json": "[1]"},
        {"config.json": "not JSON"},
        {"rows.jsonl": ""},
    ],
)
def test_folders_with_other_things_stay_as_they_are(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for overwrite in (False, True):
        with raises(InputError, "not_a_run_folder"), open_run(tmp_path, overwrite=overwrite):
            pass
    with raises(InputError, "not_a_run_folder"):
        RunFolder.read_config(tmp_path, "evaluation")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("change", [{"lam": 3}, {"layers": [3, 4, 5]}, {"versions": {}}, {"sha256": None}])
def test_a_config_that_was_altered_is_refused(tmp_path, change):
    with open_run(tmp_path):
        pass
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stored | change))
    for overwrite in (False, True):
        with raises(InputError, "run_config_damaged"), open_run(tmp_path, overwrite=overwrite):
            pass
    with raises(InputError, "run_config_damaged"):
        RunFolder.read_config(tmp_path, "evaluation")


def test_a_file_is_no_run_folder(tmp_path):
    (tmp_path / "file").write_bytes(b"precious")
    with raises(InputError, "not_a_run_folder"), open_run(tmp_path / "file"):
        pass


def test_what_a_kill_left_is_no_obstacle(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".rebind-0123456789ab.tmp").write_bytes(b"half a config")
    with open_run(tmp_path) as run:
        assert not run.resumed
        (run.path / "checkpoints" / ".rebind-0123456789ab.tmp").mkdir(parents=True)
    assert names(tmp_path) == ["checkpoints", "config.json"]
    with open_run(tmp_path):
        assert names(tmp_path / "checkpoints") == []


def test_one_process_at_a_time(tmp_path):
    code = """
with RunFolder.open(folder, "evaluation", {"n": 1}) as run:
    run.rows("rows.jsonl").append({"n": 1})
    print("open", flush=True)
    signal.pause()
"""
    with running(code, tmp_path):
        for config in ({"n": 1}, {"n": 2}):
            with raises(StorageError, "locked"), open_run(tmp_path, config):
                pass
        assert RunFolder.read_config(tmp_path, "evaluation") == {"n": 1}
    with open_run(tmp_path, {"n": 1}) as run:
        assert run.resumed
        assert run.rows("rows.jsonl").read() == [{"n": 1}]


@pytest.mark.parametrize("problem", [InputError("wrong setting"), KeyboardInterrupt()])
def test_a_run_that_fails_at_once_leaves_nothing(tmp_path, problem):
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with pytest.raises(type(problem)), open_run(tmp_path / name):
            raise problem
    assert names(tmp_path) == []


def test_a_run_that_fails_later_keeps_what_it_has(tmp_path):
    def fail(run):
        run.rows("rows.jsonl").append({"resumed": run.resumed})
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), open_run(tmp_path / "run") as run:
            fail(run)
    assert run.rows("rows.jsonl").read() == [{"resumed": False}, {"resumed": True}]


def test_links_in_a_run_folder_are_not_written_through(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"precious")
    path = tmp_path / "run"
    with open_run(path):
        pass
    for name, target in (("rows.jsonl", "file"), ("result.json", "file"), ("figures", ""), ("new.jsonl", "nothing")):
        (path / name).symlink_to(outside / target)
    with open_run(path) as run:
        run.write("result.json", b"new")
        for write in (
            lambda: run.rows("rows.jsonl").append({"n": 1}),
            lambda: run.rows("new.jsonl").append({"n": 1}),
            lambda: run.write("figures/a.png", b"x"),
            lambda: run.rows("figures/a.jsonl"),
        ):
            with raises(StorageError, "symbolic_link"):
                write()
        with pytest.raises(InputError):
            run.write("../outside/file", b"x")
    with open_run(path, {"n": 2}, overwrite=True):
        pass
    assert not (path / "rows.jsonl").is_symlink()
    (path / ".lock").unlink(missing_ok=True)
    (path / ".lock").symlink_to(outside / "file")
    with raises(StorageError, "symbolic_link"), open_run(path):
        pass
    assert {file.name: file.read_bytes() for file in outside.iterdir()} == {"file": b"precious"}


def test_the_folder_itself_may_be_a_link_of_the_user(tmp_path):
    (tmp_path / "large disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "large disk")
    with open_run(tmp_path / "run") as run:
        run.rows("rows.jsonl").append({"n": 1})
    assert names(tmp_path / "large disk") == ["config.json", "rows.jsonl"]
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with raises(StorageError, "file_in_the_way"), open_run(tmp_path / "dangling"):
        pass


def test_a_read_only_run_can_be_read_and_not_resumed(read_only):
    assert RunFolder.read_config(read_only, "evaluation") == {"n": 1}
    assert JsonLines(read_only / "rows.jsonl").read() == [{"n": 1}]
    with raises(StorageError, "no_write_access"), open_run(read_only, {"n": 1}):
        pass
