"""A trained model and its tokenizer, from a run's folder."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model

from rebind.errors import InputError
from rebind.nn.lm.config import RebindConfig
from rebind.nn.lm.decoding import recorded_decoding
from rebind.nn.lm.model import RebindForCausalLM
from rebind.nn.training import checkpoint, tokenizers


@dataclass(frozen=True, eq=False)
class Trained:
    """A model that is ready to be asked, and the folder it came from."""

    model: RebindForCausalLM
    tokenizer: Any
    folder: Path

    @torch.no_grad()
    def generate(self, prompt: str, **options: Any) -> str:
        """What follows the prompt. Options are those of transformers' `generate`."""
        end = self.tokenizer.eos_token_id
        [(ids, _)] = tokenizers.encode(self.tokenizer, [(prompt, False)])
        if not ids and end is None:
            raise InputError("the prompt has no tokens, expected some: the tokenizer has no end of text to begin after")
        given = torch.tensor([ids or [end]], device=self.model.device)
        options = {"attention_mask": torch.ones_like(given), "pad_token_id": end, **options}
        model: Any = self.model  # transformers types `generate` for its own classes
        recorded = self.model.device.type == "cuda" and not self.model.grows
        with recorded_decoding(self.model) if recorded else nullcontext():
            out = model.generate(given, **options)[0, given.shape[1] :]
        return str(self.tokenizer.decode(out, skip_special_tokens=True))


def load(folder: Path | str, *, device: str = "cpu", dtype: torch.dtype | None = None) -> Trained:
    """The newest checkpoint of a run's folder, or that of a checkpoint's own folder."""
    given = Path(folder)
    while True:
        found = checkpoint.newest(given / "checkpoints") if (given / "checkpoints").is_dir() else None
        try:
            return _loaded(given, given if found is None else found, device, dtype)
        except Exception:
            if found is None or found.is_dir():
                raise
            # a run that goes on beside us has removed it: there is a newer one


def _loaded(given: Path, path: Path, device: str, dtype: torch.dtype | None) -> Trained:
    if not (path / "config.json").is_file() or not (path / "model.safetensors").is_file():
        what = "has no checkpoint" if given.is_dir() else "is not a folder, so it has no checkpoint"
        raise InputError(f"{given} {what}, expected one that `rebind train` made: name it, or train there first")
    _require_ours(path)
    model: Any = RebindForCausalLM(RebindConfig.from_pretrained(path))  # untyped: transformers wraps `to`
    load_model(model, path / "model.safetensors")
    tokenizer = tokenizers.read_tokenizer(path)
    _require_match(path, model, tokenizer)
    return Trained(model.to(device=device, dtype=dtype).eval(), tokenizer, path)


def _require_ours(path: Path) -> None:
    kind = RebindConfig.get_config_dict(path)[0].get("model_type")
    if kind != RebindConfig.model_type:
        raise InputError(
            f"{path} holds a model of type {kind!r}, expected one that `rebind train` made: ask this one with "
            f"`rebind ask -m {path}`"
        )


def _require_match(path: Path, model: RebindForCausalLM, tokenizer: Any) -> None:
    state = path / checkpoint.STATE
    expected = json.loads(state.read_text(encoding="utf-8"))["tokenizer"] if state.exists() else None
    mark = tokenizers.fingerprint(tokenizer)
    if len(tokenizer) > model.config.vocab_size or (expected is not None and mark != expected):
        raise InputError(
            f"the tokenizer in {path} ({len(tokenizer):,} tokens, {mark}) is not the one the model was trained with "
            f"({model.config.vocab_size:,} tokens, {expected}): put that one back"
        )
