"""Bad values for every setting that Python code can make: each is refused with an error of rebind, at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import torch

from rebind.analysis import TraceSettings
from rebind.edit.facts import Fact, read_facts
from rebind.edit.guard import Guard
from rebind.edit.targets import ContextSettings, TargetSettings
from rebind.errors import RebindError
from rebind.evals import EvalConfig, QuestionSettings, get_protocol
from rebind.lab.catalogue import EXPERIMENTS
from rebind.memory.associative import Memory
from rebind.memory.rules import get_rule
from rebind.nn import RebindConfig, preset
from rebind.nn.training import DataConfig, OptimizerConfig, TrainConfig
from rebind.ops import scan_rule

NAN, INF, HUGE = math.nan, math.inf, 10**30
NESTED: Any = []
for _ in range(2_000):
    NESTED = [NESTED]
BAD = {
    int: (-1, -HUGE, NAN, INF, 2.5, "3", None, [], True, HUGE),
    float: (NAN, -INF, -1.0, "0.5", None, [], {}, -HUGE),
    str: (None, 3, [], b"x"),
    bool: (),
}
GOOD_BOUNDS = {  # values in BAD that are fine for some settings
    "Guard.drift": (INF,),
    "Guard.growth": (INF,),
    "TargetSettings.steps": (HUGE,),  # as many as anybody has time for
    "TrainConfig.steps": (HUGE,),
    "TrainConfig.evaluate_every": (HUGE,),
    "TrainConfig.evaluate_tokens": (HUGE,),
    "TrainConfig.save_every": (HUGE,),
    "TrainConfig.keep_checkpoints": (HUGE,),
    "TrainConfig.log_every": (HUGE,),
    "TrainConfig.length": (HUGE,),  # refused with the text that is too short for it
    "TrainConfig.batch_size": (HUGE,),
    "OptimizerConfig.warmup": (HUGE,),
    "DataConfig.validation": (None,),
    "TrainConfig.layers": (None,),
    "EvalConfig.drift_edits": (HUGE,),
    "QuestionSettings.free_tokens": (HUGE,),
    "QuestionSettings.texts": (HUGE,),
    "QuestionSettings.text_tokens": (HUGE,),
    "QuestionSettings.top_k": (HUGE,),
}
SETTINGS: tuple[tuple[type, dict[str, Any]], ...] = (
    (TargetSettings, {}),
    (TraceSettings, {}),
    (Guard, {}),
    (ContextSettings, {}),
    (QuestionSettings, {}),
    (EvalConfig, {}),
    (OptimizerConfig, {}),
    (DataConfig, {"source": "x"}),
    (TrainConfig, {"data": DataConfig("x")}),
)
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_experts")

Case = tuple[str, Callable[[], object]]  # a name, and a call that must raise


def cases() -> Iterator[Case]:
    """Yield every call with a bad value."""
    for kind, base in SETTINGS:
        hints = get_type_hints(kind)
        for field in fields(kind):
            name = f"{kind.__name__}.{field.name}"
            for value in BAD.get(hints[field.name], ()):
                if not any(value is fine or value == fine for fine in GOOD_BOUNDS.get(name, ())):
                    yield f"{name} = {_shown(value)}", _call(kind, {**base, field.name: value})
            if field.default is MISSING and field.default_factory is MISSING and field.name not in base:
                raise AssertionError(f"{name} needs a value here")
    for name in SIZES:
        for value in (0, -1, HUGE, 99_999_999_999, 2.5, "8", None, NAN):
            yield f"RebindConfig.{name} = {_shown(value)}", _call(RebindConfig, {name: value})
            yield f"preset {name} = {_shown(value)}", _call(preset, {"name": "modern-10m", name: value})
    yield from _facts()
    yield from _calls()


def _facts() -> Iterator[Case]:
    for value in (None, 3, [], {}, b"x", "", " ", "{}", "{a} {b}", "no subject", "{ }", NESTED):
        yield f"Fact.parse({_shown(value)})", _call(Fact.parse, {"prompt": value, "target": "Rome"})
        if not (isinstance(value, str) and value.strip()):
            yield f"Fact target {_shown(value)}", _call(Fact.parse, {"prompt": "The {x} is", "target": value})
        yield f"read_facts([{_shown(value)}])", lambda value=value: list(read_facts([value]))
    good = {"prompt": "The capital of {} is", "subject": "France", "target": "Rome"}
    for name in ("prompt", "subject", "target", "paraphrases", "neighbors", "questions", "keep", "tags", "old"):
        for value in (3, True, {"a": 1}, [3], [None], NESTED, -1.5):
            yield f"a fact with {name} = {_shown(value)}", lambda n=name, v=value: list(read_facts([{**good, n: v}]))


def _calls() -> Iterator[Case]:
    for value in (0, -1, 2.5, "4", None, HUGE):
        yield f"Memory({_shown(value)}, 4)", _call(Memory, {"d_k": value, "d_v": 4})
        yield f"get_protocol batch = {_shown(value)}", lambda v=value: _needs_bound(v) or get_protocol("batch", batch=v)
    for name in ("", "no such rule", None, 3):
        yield f"get_rule({name!r})", _call(get_rule, {"name": name})
    for word in ("", "=", "seeds", "seeds=", "seeds=0", "seeds=-1", "seeds=x", "seeds=1e99", "nothing=1", "seeds=nan"):
        for name, experiment in EXPERIMENTS.items():
            yield f"lab {name} {word!r}", lambda kind=experiment, word=word: kind().with_settings([word])
    x = torch.randn(1, 4, 2, 8)
    bad = {"NaN": x * NAN, "text": "x", "none": None, "shape": x[..., :3], "integers": x.long(), "empty": x[:, :0]}
    for name, value in bad.items():
        for at in range(3):
            if (at, name) == (2, "shape"):
                continue  # values may have any width
            arguments = [value if at == index else x for index in range(3)]
            yield f"scan_rule {at} {name}", lambda a=arguments: scan_rule("delta", *a, beta=torch.rand(1, 4, 2))


def _needs_bound(value: object) -> None:
    if value in (None, HUGE):  # all records at once
        raise RebindError("fine")


def _call(function: Callable[..., object], arguments: dict[str, Any]) -> Callable[[], object]:
    return lambda: function(**arguments)


def _shown(value: object) -> str:
    try:
        return f"{value!r:.30}"
    except RecursionError:
        return "nested lists"


def try_value(name: str) -> dict[str, str]:
    """Make one call; return how it ended."""
    call = dict(cases())[name]
    return judge_call(call)


def judge_call(call: Callable[[], object]) -> dict[str, str]:
    """Make a call; return how it ended: refused, accepted, or with an error that is not of rebind."""
    try:
        result = call()
    except RebindError as problem:
        return {"end": "refused", "text": str(problem)[:200]}
    except TypeError as problem:
        return {"end": "refused", "text": f"TypeError {problem}"[:200]}
    except Exception as problem:  # whatever it is, it is a finding
        return {"end": "traceback", "text": f"{type(problem).__name__}: {problem}"[:300]}
    return {"end": "accepted", "text": repr(result)[:200]}
