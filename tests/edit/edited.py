"""A tiny model, the same model with edits, and the change between them: for the tests of exports."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rebind.edit.export.change import compute_changes
from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.edit import Edit, pack_writes
from rebind.models.sites import find_sites, memory_of, module_at, write_memory
from tests.edit.writes import fold_edits
from tests.families import FAMILIES, tokens
from tests.support import Draw

KINDS = ["llama", "gpt2", "gpt-neox", "gemma2"]


def make_edit(model, layers, rows, seed=0, **fields):
    """Return an edit of random writes, as large as the weights they change."""
    draw = Draw(seed, torch.float32)
    sites = [find_sites(model)[layer] for layer in layers]
    tensors = pack_writes({site.name: draw.write(rows, site.d_k, site.d_v) for site in sites})
    facts = tuple(Fact.parse(f"The {{thing {seed}-{row}}} is", "new") for row in range(rows))
    names = tuple(site.name for site in sites)
    default = {"facts": facts, "method": "memit", "settings": {"layers": list(layers)}, "sites": names}
    return Edit(**{**default, "tensors": tensors, **fields})


class Case:
    """A base model, the same model edited at two sites (with 2 and 5 rows), and the change between them."""

    def __init__(self, family, dtype=torch.float32, layers=(0, 1), **options):
        self.build = lambda: FAMILIES[family](**options).to(dtype)
        self.model = self.build()
        sites = find_sites(self.model)
        self.sites = [sites[layer].name for layer in layers]
        self.edits = [make_edit(self.model, layers, 2, 1), make_edit(self.model, layers[1:], 3, 2)]
        self.base = {site: memory_of(module_at(self.model, site)).clone() for site in self.sites}
        self.edited = {site: fold_edits(self.base[site], site, self.edits) for site in self.sites}
        for site in self.sites:
            write_memory(module_at(self.model, site), self.edited[site])

    @property
    def changes(self):
        return compute_changes(self.base, self.edits, self.edited)

    def logits(self):
        return self.model(tokens()).logits


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def word_tokenizer():
    """Return a tokenizer with one token per word."""
    vocab = {token: index for index, token in enumerate(["<unk>", *"abcdef"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="<unk>")), unk_token="<unk>"
    )
