"""A tiny model, the same model edited, and what lies between them: for the tests of what leaves the editor."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rebind.edit.export.checkpoint import export_peft, save_model
from rebind.edit.export.low_rank_change import changes
from rebind.edit.export.model_card import model_card
from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.edit import Edit, fold
from rebind.models.sites import find_sites, memory_of, module_at, write_memory
from tests.families import FAMILIES, tokens
from tests.support import Draw

KINDS = ["llama", "gpt2", "gpt-neox", "gemma2"]


def make_edit(model, layers, rows, seed=0, **given):
    """An edit of random writes, as strong as the weights they change."""
    draw = Draw(seed, torch.float32)
    sites = [find_sites(model)[layer] for layer in layers]
    tensors = {}
    for site in sites:
        write = draw.write(rows, site.d_k, site.d_v)
        parts = zip(("keys", "values", "gain"), write.tensors(), strict=True)
        tensors |= {f"{site.name}/{part}": tensor for part, tensor in parts}
    facts = tuple(Fact.parse(f"The {{thing {seed}-{row}}} is", "new") for row in range(rows))
    names = tuple(site.name for site in sites)
    plain = {"facts": facts, "method": "memit", "settings": {"layers": list(layers)}, "sites": names}
    return Edit(**{**plain, "tensors": tensors, **given})


class Case:
    """A base model, the same model edited at two sites (of 2 and 5 rows), and what lies between them."""

    def __init__(self, family, dtype=torch.float32, layers=(0, 1), **options):
        self.build = lambda: FAMILIES[family](**options).to(dtype)
        self.model = self.build()
        sites = find_sites(self.model)
        self.sites = [sites[layer].name for layer in layers]
        self.edits = [make_edit(self.model, layers, 2, 1), make_edit(self.model, layers[1:], 3, 2)]
        self.base = {site: memory_of(module_at(self.model, site)).clone() for site in self.sites}
        self.edited = {site: fold(self.base[site], site, self.edits) for site in self.sites}
        for site in self.sites:
            write_memory(module_at(self.model, site), self.edited[site])

    @property
    def changes(self):
        return changes(self.base, self.edits, self.edited)

    def logits(self):
        return self.model(tokens()).logits


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def word_tokenizer():
    """A word a token."""
    vocab = {token: index for index, token in enumerate(["<unk>", *"abcdef"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="<unk>")), unk_token="<unk>"
    )


def saved_as(kind, case, folder, name="first"):
    """An export of either kind, again into the same folder."""
    card = model_card(case.edits, name, "0" * 64, library="peft" if kind == "adapter" else "transformers")
    if kind == "adapter":
        export_peft(case.model, case.changes, folder, base_name=name, card=card, overwrite=True)
    else:
        save_model(case.model, word_tokenizer(), folder, card, overwrite=True)


def put(folder, files):
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
