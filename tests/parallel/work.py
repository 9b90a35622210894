"""What the processes of `test_processes` do. Each function runs in all of them, and in the test by itself."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rebind.analysis import Tracer, TraceSettings
from rebind.analysis.layer_search import search_layers, trial_facts_from
from rebind.analysis.traces import unite_traces
from rebind.cli.app import app
from rebind.edit.editor import Editor
from rebind.edit.facts import Fact
from rebind.edit.targets import optimize
from rebind.errors import GuardError, RebindError
from rebind.lab.run import run_experiment
from rebind.parallel import alone, from_writer, gather, is_writer, join_processes, ranks, share, sum_tensors, unite
from tests import tiny
from tests.edit.editors import FACTS, QUICK, open_editor
from tests.evals import runs
from tests.lab.test_run import Norms
from tests.support import raises

MORE_FACTS = [*FACTS, Fact.parse("The capital of {Spain} is", "Paris"), Fact.parse("The sea of {Norway} is", "red")]
TRIALS = [
    Fact.parse("The capital of {France} is", "Rome", old="Paris"),
    Fact.parse("The capital of {Italy} is", "Paris", old="Rome"),
    Fact.parse("The capital of {Spain} is", "Rome", old="Madrid"),
    Fact.parse("{Berlin} is the capital of", "Spain", old="Germany"),
]


def commands(folder: Path) -> None:
    """Do everything that processes share."""
    join_processes()
    check_messages()
    with_ledger = _editor(folder / "ledger")
    first = with_ledger.rewrite_many(MORE_FACTS, method="memit", targets=QUICK)
    second = with_ledger.rewrite_many([MORE_FACTS[0]], method="dense", targets=QUICK, force=True)
    in_memory = _editor()
    in_memory.rewrite_many(MORE_FACTS, method="memit", targets=QUICK)
    traces = traced(in_memory)
    _save(folder / f"edit-{ranks().rank}", with_ledger, first.tensors, second.tensors, in_memory)
    for protocol in ("single", "sequential"):
        runs.run(folder / protocol, protocol, raw=runs.RAW[:4])
    result = run_experiment(Norms(), folder / "lab")
    document = {
        "effects": [trace.effects["mlp"].tolist() for trace in traces],
        "layers": searched(),
        "rows": result.rows,
    }
    if is_writer():
        (folder / "results.json").write_text(json.dumps(document))


def in_one_process(folder: Path) -> None:
    """Do the same by one process."""
    commands(folder)
    messages(folder)


def messages(folder: Path) -> None:
    """Exchange messages, and read moments in more processes than there are batches."""
    join_processes()
    check_messages()
    editor = open_editor(tiny.llama(dtype=torch.float64), moment_tokens=1200)
    moments = editor.moments.collect([site.name for site in editor.sites[:2]])
    states = editor.moments.collect_states(editor.sites[1].block)
    tensors = {site: moment.mean() for site, moment in moments.items()} | {"sample": states.sample}
    save_file(tensors, folder / f"moments-{ranks().rank}")


def check_messages() -> None:
    here = ranks()
    values = gather({"rank": here.rank, "tensor": torch.full((2,), here.rank), "text": ["é", None, 1.5]})
    assert [value["rank"] for value in values] == list(range(here.count))
    assert all(torch.equal(value["tensor"], torch.full((2,), rank)) for rank, value in enumerate(values))
    assert values[0]["text"] == ["é", None, 1.5]
    items = [f"item {index}" for index in range(7)]
    assert unite([item.upper() for item in share(items)]) == [item.upper() for item in items]
    total = sum_tensors({"a": torch.tensor([1.0, here.rank], dtype=torch.float64)})["a"]
    assert total.tolist() == [here.count, sum(range(here.count))]
    with alone():
        assert gather(1) == [1]
        assert is_writer()
    assert from_writer(lambda: {"from": here.rank}) == {"from": 0}
    with raises(GuardError, "no") as refused:  # an error of the writer is raised in all processes
        from_writer(_refuse)
    assert refused.value.settings == {"steps": 3}
    assert refused.value.checks == ("drift",)  # type: ignore[attr-defined]
    if here.count > 1:
        with raises(RebindError, "processes_out_of_step"):
            gather(None, "even" if here.rank % 2 == 0 else "odd")


def _refuse() -> None:
    problem = GuardError("no", settings={"steps": 3}, code="no")
    problem.checks = ("drift",)
    raise problem


def _editor(ledger: Path | None = None) -> Editor:
    return open_editor(tiny.llama(dtype=torch.float64), ledger)


def traced(editor: Editor) -> list[Any]:
    tracer = Tracer(editor.language_model, TraceSettings(kinds=("mlp",), draws=2))
    return unite_traces([tracer.trace(fact) for fact in share(MORE_FACTS[:3])])


def searched() -> dict[str, Any]:
    """Search layers on a model that knows nothing, as though it knew all facts."""
    Tracer.knows = lambda *_: True  # type: ignore[method-assign, assignment]
    editor = open_editor(tiny.llama(dtype=torch.float64, num_hidden_layers=3), moment_tokens=300)
    return search_layers(editor, trial_facts_from(TRIALS), limit=3).to_json()


def _save(path: Path, editor: Editor, *edits: Any) -> None:
    *tensors, other = edits
    named = {f"{index}.{name}": tensor for index, edit in enumerate(tensors) for name, tensor in edit.items()}
    models = {"ledger": editor.model, "memory": other.model}
    named |= {f"{kind}.{name}": one for kind, model in models.items() for name, one in model.named_parameters()}
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in named.items()}, path)


# A process that is killed


def killed(folder: Path) -> None:
    """Edit by the command line; the second process is killed before it has found its targets."""
    search = optimize._GroupSearch.run

    def die(*arguments: Any) -> Any:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return search(*arguments)

    optimize._GroupSearch.run = die  # type: ignore[method-assign]
    _edit(folder)


def resumed(folder: Path) -> None:
    """Run the same command again."""
    _edit(folder.parent / "killed")


def _edit(folder: Path) -> None:
    model = folder.parent / "model"
    words = ["edit", str(folder.parent / "facts.jsonl"), "--model", str(model), "--ledger", str(folder / "ledger")]
    app([*words, "--steps", "3", "--moment-tokens", "256", "--force", "--quiet"])


def refused(folder: Path) -> None:
    """Run commands that cannot be shared, or that fail in every process."""
    app(["ask", "Hello", "--model", str(folder.parent / "model")])
