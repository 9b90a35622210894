"""Runs survive kills and full disks, refuse folders they do not know, and repeat to the byte."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from rebind.errors import InputError, RebindWarning, StorageError, UnknownNameError
from rebind.lab import Claim, Experiment, Table, get_experiment, run_experiment
from rebind.lab.run import default_folder, describe
from rebind.lab.style import Panel, Series, figure_of
from rebind.storage import JsonLines
from tests.support import raises

FILES = ("config.json", "points.jsonl", "table.md", "figure.png", "figure.svg")


@dataclass(frozen=True)
class Norms(Experiment):
    """Norms of random vectors, three batches of `seeds` points."""

    name = "norms"
    title = "Norms"
    answers = "nothing"
    cpu_time = "no time"
    quick_settings = "sizes=2"

    sizes: tuple[int, ...] = (2, 3, 4)
    scale: float = 1.5
    label: str = "a"
    layer: int = 0
    measured: ClassVar[list] = []  # the batches that were measured, by all instances

    def batches(self):
        return [[{"size": size, "seed": seed} for seed in range(self.seeds)] for size in self.sizes]

    def measure(self, points, device):
        self.measured.append(points)
        draws = [torch.randn(p["size"], generator=torch.Generator().manual_seed(p["seed"])) for p in points]
        return [{"norm": self.scale * float(one.norm())} for one in draws]

    def table(self, rows):
        return Table(["size", "norm"], [[str(row["size"]), f"{row['norm']:.6f}"] for row in rows])

    def claims(self, rows) -> Iterator[Claim]:
        yield Claim("norms are positive", all(row["norm"] > 0 for row in rows), "all")

    def panels(self):
        return [Panel("norms", "size", "size", [Series({"label": "norm", "color": "#000000"}, "norm")])]

    def figure(self, rows):
        return figure_of(self.panels(), rows, "title", "below")[0]


class KilledError(Exception):
    pass


@dataclass(frozen=True)
class Killed(Norms):
    """The same, killed when it reaches a size."""

    at: ClassVar[int] = 0

    def measure(self, points, device):
        if points[0]["size"] == self.at:
            raise KilledError
        return super().measure(points, device)


@pytest.fixture(autouse=True)
def nothing_measured():
    Norms.measured.clear()


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


class TestResuming:
    @pytest.mark.parametrize("batches", [0, 1, 2])
    @pytest.mark.parametrize("torn", ["", '{"point": {"si', "complete line"])
    def test_a_killed_run_ends_with_the_same_bytes(self, tmp_path, batches, torn, monkeypatch):
        complete = run_experiment(Norms(), tmp_path / "complete")
        monkeypatch.setattr(Killed, "at", batches + 2)
        with pytest.raises(KilledError):
            run_experiment(Killed(), tmp_path / "killed")
        points = tmp_path / "killed" / "points.jsonl"
        if batches:  # the kill came while the next batch was being written
            lines = (tmp_path / "complete" / "points.jsonl").read_text().splitlines(keepends=True)
            with points.open("a") as file:
                file.write(lines[batches * 3] if torn == "complete line" else torn)
        Norms.measured.clear()
        resumed = run_experiment(Norms(), tmp_path / "killed")
        assert contents(tmp_path / "killed") == contents(tmp_path / "complete")
        assert resumed.resumed == 3 * batches
        assert len(Norms.measured) == 3 - batches  # finished batches are not measured again
        assert resumed.rows == complete.rows

    def test_a_finished_run_measures_nothing(self, tmp_path):
        run_experiment(Norms(), tmp_path / "out")
        before = contents(tmp_path / "out")
        Norms.measured.clear()
        assert run_experiment(Norms(), tmp_path / "out").resumed == 9
        assert Norms.measured == []
        assert contents(tmp_path / "out") == before

    def test_a_killed_process_resumes(self, tmp_path):
        """A real kill of the real command, in the middle of a real experiment."""
        command = [sys.executable, "-m", "rebind", "lab", "closed-form", "--quick", "--quiet"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = ["width=32", "passes=80", "loads=0.5,1,2"]
        killed, points = tmp_path / "killed", tmp_path / "killed" / "points.jsonl"
        process = subprocess.Popen([*command, *words, "--out", str(killed)], env=environment)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if points.exists() and points.stat().st_size:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it was finished before it could be killed"
        stored = points.read_bytes()
        ended = subprocess.run([*command, *words, "--out", str(killed)], env=environment, capture_output=True)
        assert ended.returncode in (0, 1), ended.stderr  # 1: a claim about these few points does not hold
        run_experiment(get_experiment("closed-form").quick().with_settings(words), tmp_path / "complete")
        assert contents(killed) == contents(tmp_path / "complete")
        assert points.read_bytes().startswith(stored[: stored.rindex(b"\n") + 1])

    def test_points_that_do_not_belong_are_measured_again(self, tmp_path):
        complete = run_experiment(Norms(), tmp_path / "out")
        points = tmp_path / "out" / "points.jsonl"
        lines = JsonLines(points).read()
        points.unlink()
        for line in lines:
            line["point"]["size"] = {3: 9}.get(line["point"]["size"], line["point"]["size"])
        JsonLines(points).append(lines)
        again = run_experiment(Norms(), tmp_path / "out")
        assert (again.resumed, again.rows) == (3, complete.rows)

    @pytest.mark.parametrize("change", [lambda text: text.replace("1", "2"), lambda text: text.replace("result", "r")])
    def test_points_that_were_altered_are_refused(self, tmp_path, change):
        run_experiment(Norms(), tmp_path / "out")
        points = tmp_path / "out" / "points.jsonl"
        points.write_text(change(points.read_text()))
        with raises(InputError, "damaged_row"):
            run_experiment(Norms(), tmp_path / "out")

    def test_a_full_disk_loses_nothing(self, tmp_path, monkeypatch):
        complete = run_experiment(Norms(), tmp_path / "complete")
        real, calls = os.fsync, []

        def full(handle):
            calls.append(handle)
            if len(calls) > 8:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(handle)

        monkeypatch.setattr(os, "fsync", full)
        with raises(StorageError, "disk_full"):
            run_experiment(Norms(), tmp_path / "out")
        monkeypatch.undo()
        again = run_experiment(Norms(), tmp_path / "out")
        assert again.resumed >= 3
        assert contents(again.folder) == contents(complete.folder)


class TestFolders:
    def test_another_config_is_refused(self, tmp_path):
        run_experiment(Norms(), tmp_path / "out")
        before = contents(tmp_path / "out")
        with raises(InputError, "run_folder_differs") as caught:
            run_experiment(Norms(scale=2.0), tmp_path / "out")
        assert "settings.scale" in caught.value.problem
        assert contents(tmp_path / "out") == before

    def test_a_folder_with_other_things_is_refused(self, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("years of work")
        with raises(InputError, "not_a_run_folder"):
            run_experiment(Norms(), tmp_path / "out")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]

    def test_settings_that_measuring_refuses_can_be_corrected_in_the_same_folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Killed, "at", 2)
        with pytest.raises(KilledError):
            run_experiment(Killed(), tmp_path / "out")
        assert run_experiment(Norms(scale=2.0), tmp_path / "out").resumed == 0

    def test_results_must_be_finite(self, tmp_path):
        with raises(InputError, "not_json"):
            run_experiment(Norms(scale=float("inf")), tmp_path / "out")

    def test_sizes_have_their_own_folders(self):
        cpu = torch.device("cpu")
        assert str(default_folder(Norms(), cpu)) == "runs/lab-norms"
        assert str(default_folder(Norms.quick(), cpu)) == "runs/lab-norms-quick"
        assert default_folder(Norms(scale=9.0), cpu) != default_folder(Norms(scale=8.0), cpu)

    @pytest.mark.parametrize(("device", "counted"), [("cpu", True), ("meta", False)])
    def test_threads_belong_to_the_config_on_a_cpu_alone(self, device, counted):
        threads = describe(Norms(), torch.device(device))["threads"]
        assert threads == (torch.get_num_threads() if counted else None)

    def test_an_unknown_device_leaves_nothing(self, tmp_path):
        with raises(InputError, "unusable_device"):
            run_experiment(Norms(), tmp_path / "out", device="abacus")
        assert not (tmp_path / "out").exists()


class TestFigures:
    def test_a_figure_that_cannot_be_rendered_costs_only_itself(self, tmp_path):
        class Unreadable(Norms):
            def figure(self, rows):
                figure = super().figure(rows)
                figure.text(0, 0, "$\\frac$")  # an error when it is rendered
                return figure

        with pytest.warns(RebindWarning, match="no figure"):
            result = run_experiment(Unreadable(), tmp_path / "out")
        assert result.claims
        assert (tmp_path / "out" / "table.md").exists()

    def test_measuring_needs_no_matplotlib(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        run_experiment(Norms(), tmp_path / "out")
        names = {path.name for path in (tmp_path / "out").iterdir()} - {".lock"}
        assert names == {"config.json", "points.jsonl", "table.md"}

    def test_the_list_imports_neither_matplotlib_nor_transformers(self):
        code = "import sys; import rebind.lab.run, rebind.lab.catalogue; "
        code += "sys.exit(any(name in sys.modules for name in ('matplotlib', 'transformers')))"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestSettings:
    def test_values_have_the_types_of_their_defaults(self):
        experiment = Norms().with_settings(["sizes=5,6", "scale=2", "seeds=1", "label=b", "layer=0"])
        assert experiment == Norms(seeds=1, sizes=(5, 6), scale=2.0, label="b")
        assert isinstance(experiment.scale, float)

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (["sizes"], "not_a_setting"),
            (["size=3"], "unknown_setting"),
            (["sizes="], "invalid_setting"),
            (["sizes=3,x"], "invalid_setting"),
            (["scale=big"], "invalid_setting"),
            (["scale=nan"], "invalid_setting"),
            (["scale=-1"], "invalid_setting"),
            (["seeds=0"], "invalid_setting"),
            (["sizes=3,0"], "invalid_setting"),
            (["seeds=1.5"], "invalid_setting"),
            (["scale=1", "scale=2"], "setting_twice"),
        ],
    )
    def test_wrong_ones_are_refused(self, words, code):
        with raises(InputError, code):
            Norms().with_settings(words)

    def test_a_list_has_each_value_once_and_numbers_in_order(self):
        assert Norms().with_settings(["sizes=16,4,16"]).sizes == (4, 16)
        capacity = get_experiment("capacity")().with_settings(["features=softmax,linear,softmax"])
        assert capacity.features == ("softmax", "linear")

    def test_an_unknown_experiment_is_an_error(self):
        with pytest.raises(UnknownNameError) as caught:
            get_experiment("hopfeild")
        assert "hopfield" in caught.value.advice


def test_config_holds_all_settings(tmp_path):
    result = run_experiment(replace(Norms(), label="b"), tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["settings"] == {"seeds": 3, "sizes": [2, 3, 4], "scale": 1.5, "label": "b", "layer": 0}
    assert (stored["experiment"], result.config["experiment"]) == ("norms", "norms")
