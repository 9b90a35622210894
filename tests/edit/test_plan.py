"""Plans: the cost of an edit, close to what was measured, also for models that are given by their config alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.plan import fit, measurements, predictions
from rebind.edit.facts import Fact
from rebind.edit.outline import ModelOutline, is_config_alone
from rebind.edit.plan import GIB, H200, plan_from_config
from rebind.errors import InputError
from tests import tiny
from tests.edit.editors import FACTS, open_editor
from tests.support import raises


def save_config(folder: Path, config: transformers.PreTrainedConfig) -> Path:
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    return folder


def test_the_rates_are_those_that_the_measurements_give(tmp_path):
    rates = fit(measurements(tmp_path))
    assert asdict(H200) == pytest.approx(asdict(rates), rel=0.02)


def test_a_size_that_was_not_fitted_is_predicted_from_the_others(tmp_path):
    """Two edits of ten facts include the time to record other CUDA graphs, which no plan predicts."""
    rows = predictions(measurements(tmp_path))
    memory = [row.planned_gib(others) / row.gib for row, _, others in rows]
    seconds = sorted(row.planned_seconds(others) / row.seconds for row, _, others in rows)
    assert 0.75 < min(memory) <= max(memory) < 1.25
    assert 0.3 < seconds[0] <= seconds[1] < 0.5 < seconds[2] <= seconds[-1] < 2


@pytest.mark.parametrize("method", ["memit", "dense"])
def test_a_plan_of_a_config_is_that_of_the_model(tmp_path, method):
    editor = open_editor(tiny.llama(dtype=torch.bfloat16))
    editor.model.config.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    loaded = editor.plan(FACTS, method=method)
    options = {"framings": editor.framings, "contexts": editor.context_settings, "dtype": torch.bfloat16}
    options["method"] = method
    plan = plan_from_config(tmp_path, FACTS, **options)
    for name in ("layers", "facts", "prompt_tokens", "parameters", "weight_bytes", "bytes_in_memory", "bytes_on_disk"):
        assert getattr(plan, name) == getattr(loaded, name), name
    (tmp_path / "tokenizer.json").unlink()
    guessed = plan_from_config(tmp_path, FACTS, **options)
    assert 0.4 < guessed.prompt_tokens / loaded.prompt_tokens < 2.5


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        (transformers.LlamaConfig(hidden_size=16_384, intermediate_size=53_248, num_hidden_layers=126,
                                  num_attention_heads=128, num_key_value_heads=8, vocab_size=128_256), 406, 406),
        (transformers.DeepseekV3Config(n_routed_experts=384, num_attention_heads=64, vocab_size=163_840), 993, 33),
    ],
    ids=["405B", "1T"],
)  # fmt: skip
def test_the_largest_models_are_planned_without_weights(tmp_path, config, billions, active):
    outline = ModelOutline.from_config(save_config(tmp_path, config))
    assert round(outline.parameters / 1e9) == billions
    assert round(outline.active_parameters / 1e9) == active
    plan = plan_from_config(tmp_path, [Fact.parse("The capital of {France} is", "Rome")], "memit")
    assert plan.weight_bytes == 2 * outline.parameters
    assert plan.devices[80] * 80 * GIB > plan.weight_bytes + plan.bytes_in_memory
    assert plan.devices[141] < plan.devices[80]


def test_what_is_a_config_alone(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "whole")
    save_config(tmp_path / "config", transformers.LlamaConfig())
    assert is_config_alone(tmp_path / "config")
    assert is_config_alone(tmp_path / "config/config.json")
    assert not is_config_alone(tmp_path / "whole")
    (tmp_path / "config/config.json").write_text("{}")
    with raises(InputError, "unreadable_config"):
        plan_from_config(tmp_path / "config", FACTS)
