"""The Trace tab: its numbers are those of `rebind.analysis`, on the model as edited, and cancel ends it."""

from __future__ import annotations

import pytest
import torch

from rebind.analysis import Tracer, TraceSettings, logit_lens
from rebind.edit import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.targets import TargetSettings
from rebind.studio.jobs import Job, JobCancelledError, JobControl
from rebind.studio.tabs.trace import advice, chosen_layers, trace
from tests import tiny

FACT = Fact.parse("The capital of {France} is", ".")


@pytest.fixture(scope="module")
def editor():
    return Editor(tiny.llama(), tiny.tokenizer(), corpus=tiny.texts(), moment_tokens=512, guard=None)


def test_a_trace_is_that_of_the_tracer(editor):
    job = Job("j1", "trace")
    data = trace(editor, FACT, False, draws=2, noise=3.0, control=JobControl(job))
    expected = Tracer(editor.language_model, TraceSettings(draws=2)).trace(FACT)
    for kind, rows in expected.effects.items():
        torch.testing.assert_close(torch.tensor(data["trace"]["effects"][kind], dtype=torch.float64), rows)
    lens = logit_lens(editor.language_model, FACT.text)
    assert data["lens"]["edited"]["probability"] == lens.probability.tolist()
    assert data["lens"]["edited"]["answer"] == data["trace"]["answer"]
    assert set(data["lens"]) == {"edited"}
    assert (
        data["trace"]["tokens"][data["trace"]["subject"][1]].strip()
        == "France"[-len(data["advice"]["token"]) :].strip()
    )
    best = expected.effects["mlp"][expected.prompt.subject[1]]
    assert data["advice"] == advice(expected)
    assert data["advice"]["effect"] == float(best[:-1].max()), "a block must follow the edited one"
    assert data["layers"] == chosen_layers(editor)
    assert data["layers"]["memit"]["layers"] == list(editor.settings("memit").layers)
    texts = [stage["text"] for stage in job.stages]
    assert texts == ["running the sentence with noise", "restoring states", "reading each layer"]


def test_an_edited_model_is_read_beside_its_base(editor):
    fast = TargetSettings(steps=2)
    edit = editor.rewrite("The capital of {France} is", "Rome", method="rome", layers=[1], targets=fast)
    try:
        data = trace(editor, FACT, False, draws=1, noise=3.0, control=JobControl(Job("j2", "trace")))
        assert data["edits"] == 1
        edited, base = data["lens"]["edited"], data["lens"]["base"]
        assert edited["answer"] == base["answer"]
        assert edited["probability"][-1][-1] != base["probability"][-1][-1]
        assert edited["probability"][0] == base["probability"][0]  # below the edited layer nothing differs
    finally:
        editor.undo(edit.id)
    with editor.base_model():
        lens = logit_lens(editor.language_model, FACT.text)
    assert lens.probability.tolist() == logit_lens(editor.language_model, FACT.text).probability.tolist()


def test_a_cancelled_trace_ends_at_its_next_state(editor):
    job = Job("j3", "trace")
    control = JobControl(job)
    stages = []

    class CancelSoon(JobControl):
        def stage(self, text, fraction=None):
            stages.append(text)
            job.cancel_requested = len(stages) == 3
            control.stage(text, fraction)

    with pytest.raises(JobCancelledError):
        trace(editor, FACT, False, draws=1, noise=3.0, control=CancelSoon(job))
    assert len(stages) == 3
