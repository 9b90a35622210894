"""From the options of a command line to an editor with its ledger."""

from __future__ import annotations

import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rebind.cli.options import DEFAULT_MODEL, parse_dtype, typed
from rebind.cli.places import ledgers_folder, place_of, stamp_of
from rebind.cli.ui.progress import Bars
from rebind.cli.whose import HEADER, Kept, ledger_of, ledgers_at, require_readable
from rebind.edit.cache import cache_folder
from rebind.edit.ledger.log import read_header
from rebind.errors import LedgerWarning
from rebind.files import is_file, require_writable

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.edit.ledger.ledger import Ledger


@dataclass(frozen=True)
class Wanted:
    """Which model, in which shape, with which ledger."""

    model: str = DEFAULT_MODEL
    ledger: Path | None = None
    device: str | None = None
    dtype: str | None = None
    chat: bool = False
    corpus: Path | None = None
    moment_tokens: int | None = None


def open_editor(
    wanted: Wanted, bars: Bars, *, new_ledger: bool = False, planned: bool = False, base_only: bool = False
) -> Editor:
    """The model with the edits of its ledger in place.

    With `new_ledger` a ledger that is not there is begun; otherwise a default one that is not there counts as
    empty and nothing is written. With `planned` so does one that was named. `base_only` leaves the ledger out.
    """
    dtype = parse_dtype(wanted.dtype)
    if not base_only:
        _require_ledger(wanted.ledger, new=new_ledger, planned=planned)
    if _is_packed(wanted.model):
        bars.phase("unpacking")
        from rebind.models.locate import locate

        locate(wanted.model)
    if wanted.model == DEFAULT_MODEL or Path(wanted.model).expanduser().exists():
        bars.phase("loading")  # not for Hub ids: a download shows bars of its own
    import transformers

    from rebind.edit.editor import Editor
    from rebind.edit.ledger.ledger import Ledger
    from rebind.edit.moments.corpus import Texts

    logs: Any = transformers.logging  # untyped
    logs.set_verbosity_error()
    editor = Editor(
        wanted.model,
        corpus=None if wanted.corpus is None else Texts.from_file(wanted.corpus),
        moment_tokens=wanted.moment_tokens,
        dtype=dtype,
        device=wanted.device,
        chat=wanted.chat,
        progress=bars.told(),
    )
    if base_only:
        return editor
    name, kind = editor.loaded.name, str(editor.model.dtype).removeprefix("torch.")
    place = place_of(wanted.model)
    folder = (wanted.ledger or ledger_of(name, editor.fingerprint, place)).expanduser()
    if wanted.ledger is None:
        _mention_others(wanted.model, folder, kind)
    if not new_ledger and not (folder / HEADER).exists():
        return editor
    ledger = Ledger.open(folder, editor.fingerprint, model_name=name, place=place, dtype=kind, stamp=stamp_of(place))
    if wanted.corpus is None:
        _take_samples(editor, ledger, wanted.moment_tokens)
    editor.use(ledger)
    return editor


def _mention_others(model: str, own: Path, dtype: str) -> None:
    """Say that there are edits to what lay in the model's place, where these weights have none."""
    if Kept(own).has_edits:
        return
    for kept in ledgers_at(model):
        if kept.folder.name[-8:] == own.name[-8:] or not kept.active:  # of these weights: it ends in their fingerprint
            continue
        made = kept.header.get("dtype")
        if made not in (dtype, None):
            told = f"the model in {dtype} has no edits, those in {made} are in {kept.folder}: --dtype {made} has them"
        else:
            shown = f"rebind ledger list{typed(model)} -l {shlex.quote(str(kept.folder))}"
            recast = "" if made else ", or it was loaded in another dtype"  # earlier versions did not say in which
            told = (
                f"the weights of {model} are not those that {kept.folder} was made for{recast} ({kept.described}), "
                f"whose edits are not in them: `{shown}` shows these, to be written again"
            )
        warnings.warn(told, LedgerWarning, stacklevel=2)
        return


def _require_ledger(named: Path | None, *, new: bool, planned: bool) -> None:
    """Ask before minutes of loading whether the ledger that was named is one, or a ledger can be begun there."""
    if new:
        step = "name another with --ledger" if named else "name another with REBIND_LEDGERS, or a ledger with --ledger"
        require_writable(named or ledgers_folder(), step)
    if named is None:
        require_readable()
    elif not ((new or planned) and _is_free(named.expanduser())):
        read_header(named.expanduser())  # says what is wrong with it


def _is_packed(model: str) -> bool:
    """Whether a model is a GGUF file that the cache has nothing of yet: unpacking it takes half a minute, once."""
    path = Path(model).expanduser()
    if model != DEFAULT_MODEL and not is_file(path):
        return False
    name = model if model == DEFAULT_MODEL else path.stem
    unpacked = (cache_folder() / "models").glob("*")
    return not any(folder.name.lower().startswith(name.lower()) for folder in unpacked)


def _is_free(folder: Path) -> bool:
    """Whether a ledger could be begun here."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _take_samples(editor: Editor, ledger: Ledger, tokens: int | None) -> None:
    """Go on with the model's samples that the ledger's edits were solved with.

    How many are drawn by default depends on the device, and edits that remember earlier ones need the same ones again.
    """
    from rebind.edit.methods import get_method
    from rebind.edit.moments.corpus import OwnSamples

    for edit in ledger.active:
        if get_method(edit.method).remembers:
            moments: Any = edit.settings["moments"]
            if (samples := OwnSamples.from_digest(moments["corpus"])) is not None:
                editor.corpus, editor.moment_tokens = samples, tokens or moments["tokens"]
            return
