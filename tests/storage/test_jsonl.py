"""Rows that survive a kill."""

from __future__ import annotations

import random
import time

import pytest

from rebind.errors import InputError, StorageError
from rebind.storage import JsonLines, append_at
from tests.storage.processes import output_of, running
from tests.support import raises


@pytest.fixture
def rows(tmp_path):
    return JsonLines(tmp_path / "rows.jsonl")


def test_rows_come_back_in_order(rows):
    assert rows.read() == []
    rows.append({"text": "é\n"})
    rows.append([{"n": 1}, {"n": [2.5, None]}])
    rows.append([])
    assert rows.read() == [{"text": "é\n"}, {"n": 1}, {"n": [2.5, None]}]
    assert rows.path.read_text(encoding="utf-8").count("\n") == 3


def test_folders_are_made(tmp_path):
    JsonLines(tmp_path / "a" / "b.jsonl").append({"n": 1})
    assert JsonLines(tmp_path / "a" / "b.jsonl").read() == [{"n": 1}]


@pytest.mark.parametrize("torn", [b'{"n": 2', b"{", b"x" * 10_000])
@pytest.mark.parametrize("whole", [[], [{"n": 1}]])
def test_a_torn_line_is_ignored_and_then_dropped(rows, torn, whole):
    rows.append(whole)
    with rows.path.open("ab") as file:
        file.write(torn)
    assert rows.read() == whole
    rows.append({"n": 3})
    assert rows.read() == [*whole, {"n": 3}]
    with rows.path.open("ab") as file:
        file.write(torn)
    rows.truncate(len(whole) + 1)
    assert rows.path.read_bytes().splitlines()[-1].startswith(b'{"n": 3, "crc": ')


@pytest.mark.parametrize("line", [b"not JSON", b"[1]", b""])
def test_a_damaged_line_is_reported(rows, line):
    rows.append({"n": 1})
    rows.path.write_bytes(rows.path.read_bytes() + line + b"\n")
    rows.append({"n": 2})
    with raises(InputError, "damaged_row") as caught:
        rows.read()
    assert "Line 2" in caught.value.problem


def test_every_flipped_bit_and_every_moved_line_is_noticed(rows):
    rows.append([{"n": n, "text": "é"} for n in range(3)])
    rows.append({})
    data = rows.path.read_bytes()
    first, second, *rest = data.splitlines(keepends=True)
    flipped = [
        data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for at in range(len(data) - 1) for bit in (0, 5)
    ]
    moved = [b"".join(lines) for lines in ([second, first, *rest], [second, *rest], [first, *rest], [first, first])]
    for damaged in flipped + moved:
        rows.path.write_bytes(damaged)
        with raises(InputError, "damaged_row"):
            rows.read()
    rows.path.write_bytes(data)
    assert [row.get("n") for row in rows.read()] == [0, 1, 2, None]


def test_a_link_is_not_read(rows):
    rows.append({"n": 1})
    rows.path.rename(rows.path.with_name("elsewhere"))
    rows.path.symlink_to(rows.path.with_name("elsewhere"))
    with raises(StorageError, "symbolic_link"):
        rows.read()


def test_rows_are_cut_by_number(rows):
    assert rows.truncate(0) == []
    assert not rows.path.exists()
    rows.append([{"n": n} for n in range(6)])
    assert rows.truncate(1) == rows.read() == [{"n": 0}]
    with raises(InputError, "rows_missing"):
        rows.truncate(2)
    assert rows.truncate(0) == rows.read() == []


def test_all_rows_are_written_or_none(rows):
    rows.append({"n": 1})
    with raises(InputError, "not_json"):
        rows.append([{"n": 2}, {"n": float("inf")}])
    assert rows.read() == [{"n": 1}]


def test_rows_survive_a_kill(rows):
    code = """
rows = JsonLines(folder / "rows.jsonl")
start = len(rows.read())
while True:
    rows.append([{"n": start + n, "text": "x" * 5000} for n in range(3)])
    start += 3
    print(start, flush=True)
"""
    for _ in range(4):
        with running(code, rows.path.parent):
            time.sleep(random.random() * 0.05)
        numbers = [row["n"] for row in rows.read()]
        assert numbers == list(range(len(numbers)))
        rows.truncate(len(numbers) // 3 * 3)


@pytest.mark.parametrize("write", ["JsonLines(path).append({'x': 'x' * 9000})", "append_at(path, 9, b'x' * 9000)"])
def test_a_failed_write_is_rolled_back(tmp_path, write):
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
path = folder / "rows.jsonl"
try:
    {write}
except RebindError as error:
    print(error.code)
"""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 1}\n{"torn')
    assert output_of(code, tmp_path) == "disk_full"
    assert path.read_bytes() == b'{"n": 1}\n'


@pytest.mark.parametrize("target", ["file", "nothing"])
def test_links_are_not_written_through(tmp_path, target):
    (tmp_path / "file").write_bytes(b'{"n": 1}\n')
    link = tmp_path / "rows.jsonl"
    link.symlink_to(tmp_path / target)
    for write in (
        lambda: JsonLines(link).append({"n": 2}),
        lambda: JsonLines(link).truncate(0),
        lambda: append_at(link, 0, b"x"),
    ):
        with raises(StorageError, "symbolic_link"):
            write()
    assert (tmp_path / "file").read_bytes() == b'{"n": 1}\n'
    assert not (tmp_path / "nothing").exists()


def test_data_is_put_behind_an_offset(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"whole\ntorn")
    append_at(path, 6, b"next\n")
    assert path.read_bytes() == b"whole\nnext\n"


def test_a_file_that_lost_its_end_is_not_filled_with_zeros(tmp_path):
    (tmp_path / "log").write_bytes(b"short")
    with raises(StorageError, "file_too_short"):
        append_at(tmp_path / "log", 6, b"x")
    assert (tmp_path / "log").read_bytes() == b"short"
    with pytest.raises(StorageError):
        append_at(tmp_path / "missing", 0, b"x")
    assert not (tmp_path / "missing").exists()
