"""One layer of a language model as a memory: the keys and values of facts, and the effect of each method's write.

The model is an existing one, or a random one small enough to edit in seconds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rebind.edit.editor import Editor
from rebind.edit.facts import Fact
from rebind.edit.guard import CANARY_PROMPTS
from rebind.edit.methods import EarlierKeys, add_keys, get_method
from rebind.edit.moments import OldKeys, Texts
from rebind.edit.solve import choose_lambda, weights_restored
from rebind.edit.targets.objective import TargetSettings
from rebind.errors import InputError
from rebind.evals import Record, bundled_records
from rebind.memory import Write
from rebind.models.prompts import Prompt
from rebind.models.sites import memory_of, module_at, write_memory
from rebind.storage import Row

RANDOM = "random"  # the name of a random model created on the spot
END, UNKNOWN = "<end>", "<unknown>"  # its special tokens


class LayerMemory:
    """A layer of a model, its old keys, and facts as keys and values from one target search, for every method.

    The arguments are the settings of the experiment; `facts` is the maximum number of bundled facts to write.
    """

    def __init__(
        self,
        model: str,
        layer: int,
        facts: int,
        neighbors: int,
        targets: TargetSettings,
        moment_tokens: int,
        device: torch.device,
    ) -> None:
        records = sorted(bundled_records(), key=lambda record: record.fact.tags)[:facts]
        if len(records) < facts:
            raise InputError(
                f"There are {len(records)} bundled facts, and counts go up to {facts}",
                advice=f"Set counts up to {len(records)}",
                code="too_few_facts",
            )
        if model == RANDOM:
            network, tokenizer, corpus = random_model(records)
            self.editor = Editor(network.to(device), tokenizer, corpus=corpus, moment_tokens=moment_tokens, guard=None)
        else:
            self.editor = Editor(model, device=device, moment_tokens=moment_tokens, guard=None)
        self.editor.drift()  # stores the answers of the base model
        self.neighbors = [
            Prompt(question.prompt, question.answer or record.fact.target)
            for record in records
            for question in record.neighbors[:neighbors]
        ]
        self.answers = [score.says for score in self.editor.language_model.score(self.neighbors)]  # of the base model
        self.facts = [record.fact for record in records]
        edit = self.editor.rewrite_many(self.facts, method="memit", layers=(layer,), targets=targets, force=True)
        self.editor.undo(edit.id)
        (site,) = edit.sites
        self.module, self.old_keys = module_at(self.editor.model, site), self.editor.weights.old_keys[site]
        self.keys = edit.write(site).keys.to(self.old_keys.moment)  # [n, d_k]
        self.values = edit.write(site).values.to(self.old_keys.moment)  # [n, d_v]

    def measure(self, method: str, n: int, seed: int, lam_scale: float, group: int) -> Row:
        """Write the first n facts, in the order of a seed, and measure the weights and the model."""
        indices = random.Random(seed).sample(range(len(self.facts)), len(self.facts))[:n]
        keys, values = self.keys[indices], self.values[indices]
        before = memory_of(self.module).double()
        lam = lam_scale * choose_lambda(keys, self.old_keys)
        after = write_all(method, before, keys, values, self.old_keys, lam, group)
        missing, energy = _squared_error(before, keys, values), _energy(before, self.old_keys)
        row = {
            "realized": 1 - _squared_error(after, keys, values) / missing,
            "disturbance": _energy(after - before, self.old_keys) / energy,
            "price": lam * energy / missing,  # of disturbance, relative to what was missing
        }
        with weights_restored([self.module]):
            write_memory(self.module, after)
            return row | self._ask([self.facts[index] for index in indices])

    def _ask(self, facts: Sequence[Fact]) -> Row:
        """Score the facts, the neighbors and the drift of the model as it is now."""
        prompts = [fact.as_prompt() for fact in facts]
        prompts += [fact.as_prompt(fact.old or fact.target) for fact in facts]
        scores = self.editor.language_model.score([*prompts, *self.neighbors])
        new, old, near = scores[: len(facts)], scores[len(facts) : 2 * len(facts)], scores[2 * len(facts) :]
        return {
            "exact": fmean(score.exact for score in new),
            "likelier": fmean(a.nll < b.nll for a, b in zip(new, old, strict=True)),
            "unchanged": fmean(score.says == answer for score, answer in zip(near, self.answers, strict=True)),
            "drift": self.editor.drift().kl,
        }


def write_all(
    method: str, before: Tensor, keys: Tensor, values: Tensor, old_keys: OldKeys, lam: float, group: int
) -> Tensor:
    """Return the weights [d_v, d_k] after a method has written all keys and values, at once or in groups."""
    edit_method = get_method("memit" if method == "batches" else method)
    lam = lam if edit_method.lam is None else edit_method.lam
    size = group if method in ("batches", "recursive") else len(keys)
    after: Tensor = before
    earlier: EarlierKeys = keys[:0]
    for k, v in zip(keys.split(size), values.split(size), strict=True):
        after = Write(k, v, edit_method.gain(k, old_keys, lam, earlier)).apply(after)
        if edit_method.remembers:
            earlier = add_keys(earlier, k, old_keys)
    return after


def _squared_error(weights: Tensor, keys: Tensor, values: Tensor) -> float:
    return float((keys @ weights.mT - values).square().sum())


def _energy(weights: Tensor, old_keys: OldKeys) -> float:
    """Return tr(W C Wᵀ) = E‖Wk‖² over old keys, computed with the factor of C, so that it is never negative."""
    return float((weights @ old_keys.factored.lower).square().sum())


load_layer = lru_cache(maxsize=1)(LayerMemory)  # cached for all batches of a run


def sentences_of(records: Sequence[Record]) -> list[str]:
    """Return every prompt of the records, with the old and the new target."""
    return [
        f"{prompt} {answer}"
        for record in records
        for prompt in (record.fact.text, *(question.prompt for question in record.neighbors))
        for answer in (record.fact.old, record.fact.target)
    ]


def random_model(records: Sequence[Record], *, width: int = 128) -> tuple[Any, Any, Texts]:
    """Return a random model, a tokenizer with one token per word of the records, and their text as a corpus.

    It knows nothing, but its layers are memories like those of any other model. Their keys have `width` entries.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sentences = sentences_of(records)
    tokenizer = _word_tokenizer([*sentences, *CANARY_PROMPTS])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=width,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    create: Any = LlamaForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = create(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False), tokenizer, Texts(sentences, "random model", rows=32)


def _word_tokenizer(texts: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=[END, UNKNOWN], show_progress=False))
    create: Any = PreTrainedTokenizerFast
    return create(tokenizer_object=backend, bos_token=END, eos_token=END, pad_token=END, unk_token=UNKNOWN)
