"""Bad input for every command: options, facts, model folders and texts.

The commands and their options are read from the program itself, so that a new option is tried as soon as it is there.
Each command line must end soon, with a success or with one line that begins with "error:", never with a traceback, an
internal error, or control characters of somebody else on the terminal.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from rebind.cli.app import app
from rebind.models.load import quiet
from tests import tiny
from tests.faults.children import Ending, run_child
from tests.nn import training_runs

TIMEOUT, MEMORY = 40.0, 3 << 30
FACT = ["The answer is {France}", "Rome"]
QUICK = ["--steps", "1", "--moment-tokens", "64", "--force"]
SMALL = ["--set", "hidden_size=16", "--set", "num_hidden_layers=1", "--set", "intermediate_size=16"]
SMALL += ["--length", "8", "--batch-size", "2", "--evaluate-tokens", "20"]
SHORT = ["--rounds", "3", "--seconds", "0.1", "--rules", "delta", "--only", "ours"]
MODEL = "MODEL"  # in a command line, stands for the folder of the tiny model
BASES: dict[str, list[str]] = {  # a command line that works, for each command
    "edit": ["edit", *FACT, "--model", MODEL, *QUICK],
    "ask": ["ask", "The answer is", "--model", MODEL],
    "learn": ["learn", "The capital of France is Lyon.", "--yes", "--model", MODEL, *QUICK[:2], "--force"],
    "ledger list": ["ledger", "list", "--ledger", "LEDGER"],
    "ledger show": ["ledger", "show", "e0001", "--ledger", "LEDGER"],
    "ledger undo": ["ledger", "undo", "e0001", "--ledger", "LEDGER"],
    "ledger redo": ["ledger", "redo", "e0001", "--ledger", "LEDGER"],
    "ledger diff": ["ledger", "diff", "LEDGER", "--ledger", "LEDGER"],
    "ledger verify": ["ledger", "verify", "--ledger", "LEDGER"],
    "ledger export": ["ledger", "export", "--model", MODEL, "--ledger", "LEDGER", "--no-check", "--peft", "adapter"],
    "ledger replay": ["ledger", "replay", "--model", MODEL, "--ledger", "LEDGER", "--out", "replayed"],
    "ledger compact": ["ledger", "compact", "--keep-last", "0", "--ledger", "LEDGER", "--yes"],
    "demo": ["demo", "--model", "no/such/folder"],
    "studio": ["studio", "--no-open", "--model", "no/such/folder"],
    "consolidate": ["consolidate", "--model", MODEL, "--ledger", "LEDGER"],
    "trace": ["trace", FACT[0], "--model", MODEL, "--draws", "1"],
    "lens": ["lens", "The answer is", "--model", MODEL],
    "layers": ["layers", "--model", MODEL, "--limit", "3"],
    "eval": ["eval", "--model", MODEL, "--facts", "FACTS", "--steps", "1", "--free-tokens", "0", "--texts", "0"],
    "eval compare": ["eval", "compare", "one", "two"],
    "train": ["train", "--data", "CORPUS", "--out", "run", "--steps", "1", "--tokenizer", "characters", *SMALL],
    "generate": ["generate", MODEL, "Once", "--tokens", "2"],
    "lab": ["lab", "ttt-1d", "--quick", "--seeds", "1"],
    "moments": ["moments", "--model", MODEL, "--moment-tokens", "64"],
    "bench scan": ["bench", "scan", "--shapes", "1x16x1x8", *SHORT],
    "doctor": ["doctor", "--bogus"],
}
NUMBERS = ["-1", "0", "1.5", "x", "", "nan", "inf", "-inf", "1e400", "99999999999", "1" + "0" * 30, "٣", "0x10", "1,2"]
REFUSED_NUMBERS = {"x", "", "nan", "1,2"}  # by every option that takes a number
TEXTS = [
    "",
    " ",
    "\x1b[2J\x1b[31m",
    "\udcff",
    "x" * 20_000,
    "{",
    "}{",
    "{}{}",
    "a=b=c",
    "-",
    "💥" * 40,
    "\n\n",
    "../..",
    "\u202egnp",
]
LISTS = ["0-99999999999", "99999999999", "-1", "1-", "3-1", "1,,2", "1-2-3", "٣", "1" * 5_000, "0-1" + ",0-1" * 5_000]
PATHS = [
    "",
    "FILE/x",
    "/dev/null",
    "/dev/null/x",
    "/proc/nothing/x",
    "DIR",
    "FILE",
    "LINK",
    "x" * 5_000,
    "\x1b[2J",
    "\udcff",
]
LONG_RUNNING = {"steps", "tokens", "rounds", "seconds", "moment_tokens", "free_tokens", "texts", "evaluate_tokens"}
FACT_FILES: dict[str, bytes] = {
    "nested list": b"[" * 100_000,
    "nested object": b'{"prompt": ' * 50_000,
    "nested line": b'{"prompt": "The {x} is", "target": "y", "keep": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n{}\n",
    "null": b"null", "number": b"3", "empty": b"", "spaces": b" \n\n ", "binary": bytes(range(256)) * 4,
    "utf-16": '{"prompt": "The {x} is", "target": "y"}'.encode("utf-16"),
    "list of nulls": b"[null, null]", "list of numbers": b"[1, 2, 3]", "half": b'{"prompt": "The {x} i',
    "no target": b'{"prompt": "The {x} is"}', "null target": b'{"prompt": "The {x} is", "target": null}',
    "number as prompt": b'{"prompt": 3, "target": "y"}',
    "list as subject": b'{"prompt": "a {} b", "subject": [], "target": "y"}',
    "escapes": b'{"prompt": "The {\\u001b[2J} is", "target": "\\u001b]0;title\\u0007"}',
    "surrogate": b'{"prompt": "The {x} is", "target": "\\ud800"}',
    "zero": b'{"prompt": "The {x} is", "target": "\\u0000"}',
    "huge number": b'{"prompt": "The {x} is", "target": "y", "old": 1e999}', "digits": b"[" + b"9" * 100_000 + b"]",
    "long target": b'{"prompt": "The {x} is", "target": "' + b"y " * 50_000 + b'"}',
    "long subject": b'{"prompt": "The {' + b"x" * 200_000 + b'} is", "target": "y"}',
    "bad csv": b'prompt,target\n"unclosed', "csv without columns": b"a,b\n1,2\n",
    "csv with too many": b"prompt,target\na,b,c,d\n",
    "wide csv": b"prompt," * 5_000 + b"target\n", "counterfact": b'{"requested_rewrite": 3}',
    "counterfact 2": b'{"requested_rewrite": {"prompt": "{} {}", "subject": "a", "target_new": {"str": "b"}}}',
    "zsre": b'{"src": [], "subject": {}, "alt": 3}', "knowns": b'{"known_id": 1, "attribute": null, "prompt": null}',
    "deep field": b'{"prompt": "The {x} is", "target": "y", "paraphrases": ' + b"[" * 900 + b"]" * 900 + b"}",
}  # fmt: skip
CONFIG_FIELDS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "head_dim", "rope_theta", "rms_norm_eps", "model_type", "architectures", "dtype",
    "hidden_act", "rope_parameters", "bos_token_id", "eos_token_id", "tie_word_embeddings", "auto_map",
)  # fmt: skip
CONFIG_VALUES: tuple[Any, ...] = (99_999_999_999, 10**30, -1, 0, "x", None, [], {}, 1e308, 1_000_000)

Case = tuple[str, list[str]]  # a name, and the words of a command line


def prepare(folder: Path) -> None:
    """Make what command lines refer to: a model, a ledger, a text, and some things in the way."""
    with quiet():
        tiny.llama(max_position_embeddings=128).save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    training_runs.corpus(folder)
    (folder / "file").write_bytes(b"garbage\x00\xff")
    (folder / "dir").mkdir()
    (folder / "dir" / "letter.txt").write_text("mine")
    (folder / "link").symlink_to(folder / "nowhere")
    (folder / "records.jsonl").write_text(json.dumps({"prompt": "The {x} is", "target": "Rome", "old": "Paris"}))
    (folder / "facts").mkdir()
    for number, data in enumerate(FACT_FILES.values()):
        (folder / "facts" / f"{number}.jsonl").write_bytes(data)
    words = ["edit", "The answer is {\x1b[2JFrance}", "\x1b[31mRome", "--model", str(folder / "model"), *QUICK]
    result = run_child(lambda _: _invoke([*words, "--ledger", str(folder / "ledger")], folder), folder)
    if result.status != "finished" or result.value["exit"] != 0:
        raise RuntimeError(f"the ledger could not be made: {result}")


def cases(folder: Path, seed: int) -> list[Case]:
    """Return all command lines, in random order."""
    listed = [*_options(), *_fact_files(folder), *_configs(folder), *_usage()]
    places = {MODEL: "model", "LEDGER": "ledger", "CORPUS": "corpus.txt", "FACTS": "records.jsonl"}
    places |= {"FILE": "file", "DIR": "dir", "LINK": "link", "FILE/x": "file/x"}
    names = {name: str(folder / place) for name, place in places.items()}
    replaced = [(name, [_with_places(word, names) for word in words]) for name, words in listed]
    random.Random(seed).shuffle(replaced)
    return replaced


def _with_places(word: str, names: dict[str, str]) -> str:
    """Return a word, or the value of an option, with the path that it stands for."""
    option, equals, value = word.partition("=")
    return f"{option}={names[value]}" if equals and value in names else names.get(word, word)


def commands(group: Any = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command of the program with its name."""
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
            if command.invoke_without_command:
                yield f"{prefix}{name}", command
        else:
            yield f"{prefix}{name}", command


def _options() -> Iterator[Case]:
    for name, command in commands():
        base = BASES.get(name, [*name.split()])
        for param in command.params:
            option = max(getattr(param, "opts", [""]), key=len)
            if param.param_type_name != "option" or param.is_flag or option in ("--help",):
                continue
            for value in _bad_values(param):
                yield f"{name} {option}={value[:30]!r}", [*_without(base, option), f"{option}={value}"]


def _bad_values(param: Any) -> list[str]:
    kind = param.type_descriptor.annotation
    if kind in (int, float):
        return [value for value in NUMBERS if not (param.name in LONG_RUNNING and len(value) > 8)]
    if kind is Path:
        return PATHS
    return [*TEXTS, *(LISTS if param.name in ("layers", "shapes") else [])]


def _without(words: list[str], option: str) -> list[str]:
    """Return a command line without an option and its value."""
    if option not in words:
        return words
    at = words.index(option)
    return words[:at] + words[at + 2 :]


def _fact_files(folder: Path) -> Iterator[Case]:
    for number, name in enumerate(FACT_FILES):
        file = str(folder / "facts" / f"{number}.jsonl")
        yield f"edit facts: {name}", ["edit", file, "--model", MODEL, *QUICK]
        yield f"edit --plan facts: {name}", ["edit", file, "--plan", "--skip-bad", "--model", MODEL]
        yield f"trace facts: {name}", ["trace", "--facts", file, "--model", MODEL, "--draws", "1"]
        yield f"layers facts: {name}", ["layers", "--facts", file, "--model", MODEL]
        yield f"eval facts: {name}", ["eval", "--facts", file, *BASES["eval"][1:3], "--steps", "1", "--limit", "1"]
        yield f"learn text: {name}", ["learn", file, "--yes", "--model", MODEL, "--steps", "1", "--force"]
        yield f"train text: {name}", ["train", "--data", file, *BASES["train"][3:]]
        yield f"corpus: {name}", ["moments", "--model", MODEL, "--corpus", file, "--moment-tokens", "64"]


def _configs(folder: Path) -> Iterator[Case]:
    for field in CONFIG_FIELDS:
        for value in CONFIG_VALUES:
            word = f"CONFIG {json.dumps({field: value})}"
            yield (
                f"ask, config with {field} = {str(value)[:20]}",
                ["ask", "The answer is", "--tokens", "1", "--model", word],
            )


def _usage() -> Iterator[Case]:
    for name, command in commands():
        words, base = name.split(), BASES.get(name, name.split())
        if any(param.required for param in command.params):  # others do their work, which may take minutes
            yield f"{name}: nothing", words
        yield f"{name}: unknown option", [*base, "--no-such-option"]
        yield f"{name}: too many words", [*base, *["word"] * 30]
        yield f"{name}: escapes", [*words, "\x1b[2J", "--\x1b[31m"]
        yield f"{name}: invalid text", [*words, "\udcff\udcfe"]


# Trying


def try_input(words: list[str], scratch: Path, folder: Path) -> tuple[str, list[tuple[str, str]]]:
    """Run a command line in a folder of its own; return how it ended, and what is wrong with that."""
    scratch.mkdir()
    ending = run_child(lambda _: _invoke(words, scratch, folder), scratch, timeout=TIMEOUT, memory=MEMORY)
    end = f"exit {ending.value['exit']}" if ending.status == "finished" else ending.status
    return end, _judge(words, ending)


def _invoke(words: list[str], scratch: Path, folder: Path | None = None) -> dict[str, Any]:
    os.chdir(scratch)
    for name in ("CACHE", "LEDGERS", "DATA"):
        os.environ[f"REBIND_{name}"] = str(scratch / name.lower())
    words = [_forged_model(word, scratch, folder) if word.startswith("CONFIG ") else word for word in words]
    if folder is not None and any((ledger := str(folder / "ledger")) in word for word in words):
        shutil.copytree(folder / "ledger", scratch / "ledger")  # which the command may change
        words = [word.replace(ledger, str(scratch / "ledger")) for word in words]
    result = CliRunner().invoke(app, words)
    error = "" if result.exception is None or isinstance(result.exception, SystemExit) else repr(result.exception)
    return {"exit": result.exit_code, "out": result.stdout[-4000:], "err": result.stderr[-4000:], "raised": error}


def _forged_model(word: str, scratch: Path, folder: Path | None) -> str:
    """Make a copy of the model with another config, and return its folder."""
    assert folder is not None
    copy = scratch / "forged"
    copy.mkdir()
    for file in (folder / "model").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text()) | json.loads(word.removeprefix("CONFIG "))
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


def _judge(words: list[str], ending: Ending) -> list[tuple[str, str]]:
    if ending.status == "stuck":
        return [("stuck", f"no end within {TIMEOUT:g} s")]
    if ending.status != "finished":
        return [("traceback", ending.problem or ending.status)]
    value, problems = ending.value, []
    both = value["out"] + value["err"]
    if value["raised"] or "Traceback" in both:
        problems.append(("traceback", value["raised"] or both[-600:]))
    if "Unexpected " in value["err"]:
        problems.append(("unclear", value["err"][-400:]))
    elif value["exit"] and "error:" not in value["err"] and "✗" not in both and len(words) > 1:
        problems.append(("unclear", f"exit code {value['exit']} without an error: {both[-300:]!r}"))
    if "Out of memory" in value["err"]:
        problems.append(("unclear", value["err"][-300:]))
    if "--json" not in words and re.search("\x1b\\[2J|\x1b\\[31mRome|\u202e", both):
        problems.append(("unclear", "control characters reach the terminal"))
    if value["exit"] == 0 and (word := words[-1]).startswith("--") and word.partition("=")[2] in REFUSED_NUMBERS:
        name = word.partition("=")[0]
        if name.removeprefix("--").replace("-", "_") in NUMERIC:
            problems.append(("silent", f"{word} was accepted"))
    return problems


NUMERIC = {
    param.name
    for _, command in commands()
    for param in command.params
    if param.param_type_name == "option" and param.type_descriptor.annotation in (int, float)
}
