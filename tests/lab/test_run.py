"""Runs survive kills and full disks, refuse what they do not know, and repeat to the byte."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import pytest
import torch

from rebind.errors import InputError, StorageError, UnknownNameError
from rebind.lab.catalogue import EXPERIMENTS, get_experiment
from rebind.lab.experiment import Claim, Config, Experiment, LabWarning, Table, configure
from rebind.lab.run import default_folder, describe, run

FILES = ("config.json", "points.jsonl", "table.md", "figure.png", "figure.svg")


@dataclass(frozen=True)
class Small(Config):
    sizes: tuple[int, ...] = (2, 3, 4)
    scale: float = 1.5
    name: str = "a"


def _figure(config, rows):
    from rebind.lab import style

    drawn, (axes,) = style.panels(1, "title", "below")
    axes.plot([row["size"] for row in rows], [row["norm"] for row in rows])
    return drawn


def made(measure=None) -> Experiment[Small]:
    """Norms of random vectors, three batches of `seeds` points."""

    def norms(config, points, device):
        draws = [torch.randn(p["size"], generator=torch.Generator().manual_seed(p["seed"])) for p in points]
        return [{"norm": config.scale * float(one.norm())} for one in draws]

    return Experiment(
        name="norms",
        title="Norms",
        answers="nothing",
        takes="no time",
        config=Small(),
        quick=Small(sizes=(2,)),
        batches=lambda config: [
            [{"size": size, "seed": seed} for seed in range(config.seeds)] for size in config.sizes
        ],
        measure=measure or norms,
        table=lambda config, rows: Table(["size", "norm"], [[str(row["size"]), f"{row['norm']:.6f}"] for row in rows]),
        figure=_figure,
        claims=lambda config, rows: [Claim("norms are positive", all(row["norm"] > 0 for row in rows), "all")],
    )


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


class KilledError(Exception):
    pass


def stopping_after(batches, spoil=lambda points: None):
    """A measurement that is killed when so many batches are done."""
    left = [batches]

    def measure(config, points, device):
        if left[0] == 0:
            raise KilledError
        left[0] -= 1
        spoil(points)
        return made().measure(config, points, device)

    return measure


class TestResuming:
    @pytest.mark.parametrize("batches", [0, 1, 2])
    @pytest.mark.parametrize("tail", ["", '{"point": {"si', "whole"])
    def test_a_killed_run_ends_with_the_same_bytes(self, tmp_path, batches, tail):
        whole = run(made(), Small(), tmp_path / "whole")
        with pytest.raises(KilledError):
            run(made(stopping_after(batches)), Small(), tmp_path / "cut")
        lines = (tmp_path / "whole" / "points.jsonl").read_text().splitlines(keepends=True)
        with (tmp_path / "cut" / "points.jsonl").open("a") as file:  # the kill came while a batch was being written
            file.write(lines[batches * 3] if tail == "whole" else tail)
        seen = []
        again = run(made(stopping_after(9, seen.append)), Small(), tmp_path / "cut")
        assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
        assert again.resumed == 3 * batches
        assert len(seen) == 3 - batches  # finished points are not measured again
        assert again.rows == whole.rows

    @pytest.mark.parametrize("killed_after", [0, 1, 2, None])
    def test_batches_may_come_in_any_order(self, tmp_path, killed_after):
        """Side by side the last may be there first; a kill then leaves a gap, and only that is filled."""
        asked = []

        def backwards(config, batches, device):
            asked.append(len(batches))
            for number in reversed(range(len(batches))):
                if len(batches) - 1 - number == killed_after and len(asked) == 1:
                    raise KilledError
                yield number, made().measure(config, batches[number], device)

        whole = run(made(), Small(), tmp_path / "whole")
        experiment = replace(made(), side_by_side=backwards)
        with pytest.raises(KilledError) if killed_after is not None else contextlib.nullcontext():
            run(experiment, Small(), tmp_path / "cut")
        again = run(experiment, Small(), tmp_path / "cut")
        assert again.rows == whole.rows
        assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
        assert asked == ([3, 0] if killed_after is None else [3, 3 - killed_after])

    def test_a_finished_run_measures_nothing(self, tmp_path):
        run(made(), Small(), tmp_path / "out")
        before = contents(tmp_path / "out")
        assert run(made(stopping_after(0)), Small(), tmp_path / "out").resumed == 9
        assert contents(tmp_path / "out") == before

    def test_a_killed_process_goes_on(self, tmp_path):
        """A real kill of the real command, in the middle of a real experiment."""
        command = [sys.executable, "-m", "rebind", "lab", "closed-form", "--quick", "--quiet"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = ["width=32", "passes=150", "loads=0.5,1,1.5,2,2.5,3"]
        cut, points = tmp_path / "cut", tmp_path / "cut" / "points.jsonl"
        process = subprocess.Popen([*command, *words, "--out", str(cut)], env=environment)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if points.exists() and points.stat().st_size:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it was done before it could be killed"
        done = points.read_bytes()
        subprocess.run([*command, *words, "--out", str(cut)], env=environment, check=True, capture_output=True)
        experiment = get_experiment("closed-form")
        run(experiment, configure(experiment.quick, words), tmp_path / "whole")
        assert contents(cut) == contents(tmp_path / "whole")
        assert points.read_bytes().startswith(done[: done.rindex(b"\n") + 1])


class TestWhatIsThereStays:
    def test_another_config_is_refused(self, tmp_path):
        run(made(), Small(), tmp_path / "out")
        before = contents(tmp_path / "out")
        with pytest.raises(InputError, match=r"settings.scale \(1.5 there, 2.0 here\).*--out"):
            run(made(), Small(scale=2.0), tmp_path / "out")
        assert contents(tmp_path / "out") == before

    def test_two_runs_do_not_share_a_folder(self, tmp_path):
        def measure(config, points, device):
            with pytest.raises(InputError, match="is being filled by another process"):
                run(made(), Small(), tmp_path / "out")
            return made().measure(config, points, device)

        assert len(run(made(measure), Small(), tmp_path / "out").rows) == 9

    def test_a_foreign_folder_is_refused(self, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("years of work")
        with pytest.raises(InputError, match="out is there already and holds no lab run: name another --out"):
            run(made(), Small(), tmp_path / "out")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]

    @pytest.mark.parametrize("found", [{"architectures": ["LlamaForCausalLM"], "vocab_size": 9}, {"settings": {}}, [1]])
    def test_another_programs_config_is_no_run(self, tmp_path, found):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text(json.dumps(found))
        with pytest.raises(InputError) as caught:
            run(made(), Small(), tmp_path / "out")
        assert str(caught.value) == f"{tmp_path / 'out'} is there already and holds no lab run: name another --out"
        assert json.loads((tmp_path / "out" / "config.json").read_text()) == found

    def test_half_written_settings_are_no_something_else(self, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / ".config.json.0a1b2c.tmp").write_text("{")
        assert len(run(made(), Small(), tmp_path / "out").rows) == 9

    def test_a_figure_that_cannot_be_saved_costs_only_itself(self, tmp_path):
        def figure(config, rows):
            drawn = _figure(config, rows)
            drawn.text(0, 0, "$\\frac$")  # found out when it is drawn
            return drawn

        with pytest.warns(LabWarning, match="no figure"):
            found = run(replace(made(), figure=figure), Small(), tmp_path / "out")
        assert found.claims
        assert (tmp_path / "out" / "table.md").exists()

    def test_settings_that_measuring_refuses_leave_nothing(self, tmp_path):
        def refuse(config, points, device):
            raise InputError("size is 2, expected 3: change it")

        with pytest.raises(InputError, match="size is 2"):
            run(made(refuse), Small(), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_points_of_another_run_are_refused(self, tmp_path):
        run(made(), Small(), tmp_path / "out")
        file = tmp_path / "out" / "points.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join([lines[1], *lines[1:]]))
        with pytest.raises(InputError, match=r"line 2 of .* is about .*'seed': 1.*, again"):
            run(made(), Small(), tmp_path / "out")
        file.write_text(lines[0].replace('"size": 2', '"size": 9'))
        with pytest.raises(InputError, match=r"line 1 of .* is about .*'size': 9.*not of this run"):
            run(made(), Small(), tmp_path / "out")

    def test_a_damaged_config_is_named(self, tmp_path):
        run(made(), Small(), tmp_path / "out")
        (tmp_path / "out" / "config.json").write_text("{")
        with pytest.raises(InputError, match="config.json cannot be read"):
            run(made(), Small(), tmp_path / "out")

    def test_a_full_disk_loses_nothing(self, tmp_path, monkeypatch):
        whole = run(made(), Small(), tmp_path / "whole")
        real, calls = os.fsync, []

        def full(handle):
            calls.append(handle)
            if len(calls) > 5:  # the config takes two (file and folder), each batch one
                raise OSError(errno.ENOSPC, "No space left on device")
            real(handle)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"No space left on device.*goes on from here|free some space"):
            run(made(), Small(), tmp_path / "out")
        monkeypatch.undo()
        again = run(made(), Small(), tmp_path / "out")
        assert again.resumed >= 6
        assert contents(again.folder) == contents(whole.folder)

    def test_numbers_that_are_none_stop_the_run(self, tmp_path):
        def measure(config, points, device):
            return [{"norm": float("nan")} for _ in points]

        with pytest.raises(InputError, match="norm of .*'size': 2"):
            run(made(measure), Small(), tmp_path / "out")
        assert not (tmp_path / "out" / "points.jsonl").exists()

    def test_measuring_needs_no_matplotlib(self, tmp_path, monkeypatch):
        monkeypatch.setattr("rebind.lab.run.find_spec", lambda name: None)
        run(made(), Small(), tmp_path / "out")
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "points.jsonl", "table.md"]

    def test_listing_imports_no_matplotlib(self):
        code = "import sys; import rebind.lab.catalogue, rebind.lab.run; sys.exit('matplotlib' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestOverrides:
    def test_values_take_their_types(self):
        config = configure(Small(), ["sizes=5,6", "scale=2", "seeds=1", "name=b"])
        assert config == Small(seeds=1, sizes=(5, 6), scale=2.0, name="b")
        assert isinstance(config.scale, float)

    @pytest.mark.parametrize(
        ("word", "says"),
        [
            ("sizes", "expected key=value with a key of seeds, sizes, scale, name"),
            ("size=3", "unknown setting 'size'.*did you mean 'sizes'"),
            ("sizes=", "sizes is empty"),
            ("sizes=3,x", "sizes is 'x', expected a whole number"),
            ("scale=big", "scale is 'big', expected a number"),
            ("scale=nan", "scale is 'nan', expected a number"),
            ("scale=-1", "scale is '-1', expected a number of 0 or more"),
            ("seeds=0", "seeds is '0', expected a whole number of 1 or more"),
            ("sizes=3,0", "sizes is '0', expected a whole number of 1 or more"),
            ("seeds=1.5", "seeds is '1.5', expected a whole number"),
        ],
    )
    def test_bad_ones_say_what_is_wrong(self, word, says):
        with pytest.raises(InputError, match=says):
            configure(Small(), [word])

    def test_a_list_has_each_once_and_numbers_in_order(self):
        assert configure(Small(), ["sizes=16,4,16"]).sizes == (4, 16)
        features = configure(get_experiment("capacity").config, ["features=softmax,linear,softmax"]).features
        assert features == ("softmax", "linear")

    def test_a_layer_may_be_the_first(self):
        experiment = get_experiment("edits")
        assert configure(experiment.config, ["layer=0"]).layer == 0

    def test_twice_is_refused(self):
        with pytest.raises(InputError, match="scale is set twice"):
            configure(Small(), ["scale=1", "scale=2"])

    def test_sizes_have_folders_of_their_own(self):
        cpu = torch.device("cpu")
        assert str(default_folder(made(), Small(), cpu)) == "runs/lab-norms"
        assert str(default_folder(made(), Small(sizes=(2,)), cpu)) == "runs/lab-norms-quick"
        other = default_folder(made(), replace(Small(), scale=9.0), cpu)
        assert other.name.startswith("lab-norms-")
        assert other != default_folder(made(), replace(Small(), scale=8.0), cpu)


def test_an_unknown_experiment_is_named():
    with pytest.raises(UnknownNameError, match="unknown experiment 'hopfeild'.*did you mean 'hopfield'"):
        get_experiment("hopfeild")


@pytest.mark.parametrize(
    ("name", "word", "says"),
    [
        ("capacity", "features=linear,bogus", "unknown feature 'bogus'"),
        ("overwrite", "features=linear,bogus", "unknown feature 'bogus'"),
        ("overwrite", "rules=sum,nope", "unknown rule 'nope'"),
        ("overwrite", "features=dpfp-1,softmax", "expected sum alone with softmax"),
        ("mqar", "rules=sum,nope", "unknown rule 'nope'"),
        ("mqar", "trained=16x4,16x", "size is '16x'"),
        ("mqar", "tested=16x4,16x5", "5 pairs in 16 tokens"),
        ("edits", "methods=memit,nope", "unknown method 'nope'"),
        ("forgetting", "pools=0.5,8", "pool 8 has 512 distinct keys and the stream 640 writes"),
        ("forgetting", "length=1", "pool 1 has 64 distinct keys and the stream 64 writes"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(name, word, says):
    experiment = get_experiment(name)
    with pytest.raises(InputError, match=says):
        experiment.batches(configure(experiment.quick, [word]))


def test_an_unknown_device_is_named(tmp_path):
    with pytest.raises(InputError, match="device 'abacus' cannot be used here"):
        run(made(), Small(), tmp_path / "out", device="abacus")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_configs_survive_json(name):
    from rebind.lab.experiment import settings

    for config in (EXPERIMENTS[name].config, EXPERIMENTS[name].quick):
        assert json.loads(json.dumps(settings(config))) == settings(config)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("closed-form", ["keys=sphere", "loads=0.5", "width=8", "passes=2"]),
        ("forgetting", ["width=8", "streams=2", "pools=0.5"]),
        (
            "hopfield",
            ["units=20", "loads=0.1", "modern=8", "rates=0.25", "betas=1", "overlaps=0", "small=20", "starts=4"],
        ),
        ("ttt-1d", ["widths=2", "tasks=4", "outer=2", "tokens=12"]),
        ("cost", ["lengths=16", "widths=8", "counts=2", "width=8", "heads=1"]),
        ("capacity", ["sizes=4", "features=softmax", "steps=4", "every=2"]),
        ("overwrite", ["sizes=4", "rules=delta", "steps=4", "every=2"]),
    ],
)
@pytest.mark.filterwarnings("ignore::rebind.lab.experiment.LabWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:matplotlib")
def test_few_points_are_no_disaster(name, words, tmp_path):
    """Settings that leave nothing to compare cost a claim or a figure, never what was measured."""
    experiment = get_experiment(name)
    found = run(experiment, configure(experiment.quick, [*words, "seeds=1"]), tmp_path / "out")
    assert found.rows
    assert (tmp_path / "out" / "table.md").exists()


@pytest.mark.parametrize(("device", "said"), [("cpu", True), ("meta", False)])
def test_threads_are_part_of_a_run_on_a_cpu_alone(device, said):
    found = describe(get_experiment("cost"), get_experiment("cost").quick, torch.device(device))["threads"]
    assert found == (torch.get_num_threads() if said else None)
