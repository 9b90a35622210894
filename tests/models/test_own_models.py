"""Models of rebind.nn are loaded and edited like any other."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rebind.edit import Editor, Fact, TargetSettings
from rebind.edit.targets import ContextSettings
from rebind.errors import InputError
from rebind.models.caches import borrow_cache
from rebind.models.language_model import LanguageModel
from rebind.nn import RebindConfig, RebindForCausalLM, RebindForSeq2SeqLM, RebindSeq2SeqConfig
from tests import tiny
from tests.families import tokens
from tests.support import raises

FACT = Fact.parse("The capital of {France} is", "Rome")


def save_own(folder, kind):
    """Save an untrained model with its tokenizer."""
    tokenizer = tiny.tokenizer()
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    config = RebindConfig(vocab_size=len(tokenizer), layer_kinds=kind, eos_token_id=0, initializer_range=0.2, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        RebindForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_loading_needs_no_import_of_our_classes(tmp_path):
    folder = save_own(tmp_path / "own", "delta")
    code = f"from rebind.models import LanguageModel; print(type(LanguageModel.load({str(folder)!r}).model).__name__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "RebindForCausalLM", run.stderr


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_the_code_in_the_model_card_runs(tmp_path):
    editor = Editor(save_own(tmp_path / "own", "delta"), corpus=tiny.texts(), moment_tokens=1500, guard=None)
    editor.rewrite(
        "The capital of {France} is", "Rome", method="memit", layers=[2], targets=TargetSettings(rate=0.5, steps=1)
    )
    folder = editor.save(tmp_path / "out")
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("\n```")[0]
    assert code.startswith("import rebind.nn"), "transformers does not know the class without it"
    names = {"folder": str(folder), "prompt": FACT.text}
    exec(code, names)
    assert isinstance(names["model"], RebindForCausalLM)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize(
    ("kind", "layer"),  # a layer at which an untrained model reacts to a change
    [("attention", 2), ("gated_delta", 1), (["delta", "attention"], 2), ("linear-sum", 2), ("ttt-linear", 2)],
)
def test_our_models_can_be_edited(tmp_path, kind, layer, device):
    settings = {"corpus": tiny.texts(), "moment_tokens": 1500, "contexts": ContextSettings(("The", "I"), tokens=4)}
    editor = Editor(save_own(tmp_path / "own", kind), device=device, guard=None, **settings)
    base, before = tiny.weights(editor.model), editor.score([FACT])[0]
    search = TargetSettings(rate=0.5, keep=0.0, steps=20, clamp=2.0)
    edit = editor.rewrite_many([FACT], method="memit", layers=[layer], targets=search)
    assert editor.score([FACT])[0].nll < before.nll - 0.2  # what was written at the subject is read a token later
    editor.undo(edit.id)
    assert tiny.weights(editor.model) == base


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("kind", ["attention", "gated_delta", "ttt-linear"])
@torch.no_grad()
def test_a_run_does_not_change_a_borrowed_cache(tmp_path, kind, length):
    model = LanguageModel.load(save_own(tmp_path / "own", kind)).model
    first, then = tokens(2, 5), tokens(2, length, seed=1)
    past = model(first, use_cache=True).past_key_values
    whole = model(torch.cat([first, then], dim=1)).logits[:, 5:]
    for _ in range(2):  # the second run finds the cache as the first did
        assert torch.allclose(model(then, past_key_values=borrow_cache(past)).logits, whole, atol=1e-5)


def test_our_encoder_decoder_is_refused(tmp_path):
    shape = {"hidden_size": 16, "encoder_layers": 1, "decoder_layers": 1, "num_attention_heads": 2}
    RebindForSeq2SeqLM(RebindSeq2SeqConfig(vocab_size=96, **shape)).save_pretrained(tmp_path / "own")
    with raises(InputError, "unreadable_model"):
        LanguageModel.load(tmp_path / "own")
