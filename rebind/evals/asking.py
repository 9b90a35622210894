"""Many questions to a model in few passes.

`ask`: how likely each target is after its prompt. Prompts of like length run together; one prompt's keys and
values are computed once, however many targets are asked of it, and only the targets' tokens run for each.
`generate`: how the model goes on by itself, all prompts side by side on one cache.

Results stay on the device until the last portion is done: nothing waits for the host in between.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rebind.edit.editor import Editor
from rebind.edit.facts.encoding import Encoded, encode_many
from rebind.edit.facts.fact import Fact
from rebind.errors import InputError
from rebind.models.batching import in_portions
from rebind.models.tokenizer import continued
from rebind.models.trunk import Tokens, Trunk, select_cache

WORST = 1e4  # the NLL of a target where a broken model answers NaN
CPU_TOKENS, GPU_TOKENS = 4_096, 65_536  # in one portion


@dataclass(frozen=True)
class Model:
    """What is asked: a model in pieces, and how text becomes its tokens. What was tokenised once is remembered."""

    trunk: Trunk
    tokenizer: Any
    start: tuple[int, ...]  # begins every sequence
    chat: bool = False
    encoded: dict[tuple[str, str], Encoded] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, editor: Editor) -> Model:
        """An editor's model, asked as the editor would."""
        return cls(editor.trunk, editor.tokenizer, editor.loaded.start, editor.chat)

    @property
    def tokens_at_once(self) -> int:
        return GPU_TOKENS if self.trunk.device.type == "cuda" else CPU_TOKENS

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[Encoded]:
        """Prompts and what may follow them, as tokens; the whole prompt counts as subject."""
        missing = [pair for pair in dict.fromkeys(pairs) if pair not in self.encoded]
        facts = [Fact("{}", prompt, target) for prompt, target in missing]
        found = encode_many(facts, self.tokenizer, self.start, chat=self.chat, limit=self.trunk.context)
        self.encoded.update(zip(missing, found, strict=True))
        return [self.encoded[pair] for pair in pairs]


@dataclass(frozen=True)
class Told:
    """How a model takes a target after a prompt."""

    nll: float  # a token
    tokens: int  # of the target
    right: int  # of them the model's first choice, those before given
    first: int  # the model's first choice for the first of them


@dataclass(frozen=True)
class _Asked:
    """A prompt with all stems that follow it: the targets without their last tokens, whose logits are not needed."""

    ids: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]

    @property
    def stems(self) -> list[tuple[int, ...]]:
        return list(dict.fromkeys(target[:-1] for target in self.targets))

    @property
    def size(self) -> tuple[int, int, int]:
        """(rows, prefix, suffix) in a portion."""
        return len(self.stems), len(self.ids) - 1, max(map(len, self.stems)) + 1


@torch.no_grad()
def ask(model: Model, pairs: Sequence[tuple[str, str]]) -> list[Told]:
    """How the model takes each (prompt, target)."""
    if not pairs:
        return []
    encoded = model.encode(pairs)
    grouped: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
    for one in encoded:
        grouped.setdefault(one.ids, {})[one.target] = None
    asked = [_Asked(ids, tuple(targets)) for ids, targets in grouped.items()]
    sizes = [one.size for one in asked]
    order = sorted(range(len(asked)), key=lambda index: (sizes[index][1], sizes[index]))
    keys: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    parts: list[tuple[Tensor, Tensor]] = []
    for portion, part in in_portions(sizes, order, model.tokens_at_once, partial(_ask_some, model.trunk, asked)):
        parts.append(part)
        keys += [(asked[index].ids, target) for index in portion for target in asked[index].targets]
    lengths = [len(target) for _, target in keys]
    likely = torch.cat([part[0] for part in parts]).cpu().split(lengths)
    first = torch.cat([part[1] for part in parts]).cpu().split(lengths)
    told = {
        key: _told(key[1], mine.tolist(), said.tolist()) for key, mine, said in zip(keys, likely, first, strict=True)
    }
    return [told[one.ids, one.target] for one in encoded]


def _told(target: Sequence[int], likely: Sequence[float], said: Sequence[int]) -> Told:
    right = sum(one == other for one, other in zip(target, said, strict=True))
    nll = -sum(likely) / len(target)
    return Told(nll if math.isfinite(nll) else WORST, len(target), right, said[0])


def _ask_some(trunk: Trunk, asked: Sequence[_Asked], portion: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Log-probability of every target token, and the model's first choice in its place, target after target."""
    prompts = [asked[index] for index in portion]
    prefixes = Tokens.left_padded([one.ids[:-1] for one in prompts], trunk.device)
    cache = trunk.cache(prefixes)
    rows = [(place, stem) for place, one in enumerate(prompts) for stem in one.stems]
    row_of = {row: index for index, row in enumerate(rows)}
    owners = torch.tensor([place for place, _ in rows], device=trunk.device)
    suffixes = [[prompts[place].ids[-1], *stem] for place, stem in rows]
    alone = len(rows) == len(prompts)
    tokens = Tokens.following(prefixes if alone else prefixes.select(owners), suffixes)
    where = [(row, step) for row, suffix in enumerate(suffixes) for step in range(len(suffix))]
    begins = {row: index for index, (row, step) in enumerate(where) if step == 0}
    logits = trunk.logits(tokens, torch.tensor(where), cache=cache if alone else select_cache(cache, owners))
    picks = [
        (begins[row_of[place, target[:-1]]] + step, token)
        for place, one in enumerate(prompts)
        for target in one.targets
        for step, token in enumerate(target)
    ]
    places, wanted = torch.tensor(picks, device=logits.device).unbind(-1)
    likely = logits[places, wanted] - logits.logsumexp(-1)[places]
    return likely, logits.argmax(-1)[places]


@torch.no_grad()
def generate(
    model: Model, prompts: Sequence[str], tokens: int, *, top_k: int | None = None, seed: int = 0
) -> list[str]:
    """How the model goes on after each prompt, by its first choices, or drawn from the `top_k` best of them."""
    if not prompts:
        return []
    distinct = list(dict.fromkeys(prompts))
    encoded = model.encode([(prompt, ".") for prompt in distinct])
    rooms = [_room(model.trunk, one, tokens) for one in encoded]
    sizes = [(1, len(one.ids) + room) for one, room in zip(encoded, rooms, strict=True)]
    by_size = sorted(range(len(distinct)), key=lambda index: sizes[index])
    parts: list[tuple[list[int], Tensor]] = []
    for room in sorted(set(rooms), reverse=True):  # apart: a long prompt would cut short what follows the others
        order = [index for index in by_size if rooms[index] == room]
        run = partial(_generate_some, model.trunk, encoded, room, top_k, seed)
        parts += in_portions(sizes, order, model.tokens_at_once, run)
    texts: dict[str, str] = {}
    ends = _ends(model)
    for portion, made in parts:
        for index, row in zip(portion, made.cpu().tolist(), strict=True):
            texts[distinct[index]] = continued(model.tokenizer, encoded[index].ids, _until(row, ends))
    return [texts[prompt] for prompt in prompts]


def _room(trunk: Trunk, prompt: Encoded, tokens: int) -> int:
    """How many of so many tokens the model's context has room for after a prompt; one at least."""
    return tokens if trunk.context is None else max(1, min(tokens, trunk.context - len(prompt.ids)))


def _generate_some(
    trunk: Trunk, encoded: Sequence[Encoded], tokens: int, top_k: int | None, seed: int, portion: Sequence[int]
) -> Tensor:
    """Tokens [rows, tokens] that follow these prompts."""
    rows = [encoded[index].ids for index in portion]
    device = trunk.device
    noise = None if top_k is None else _noise(rows, tokens, top_k, seed).to(device)
    prefixes = Tokens.left_padded([row[:-1] for row in rows], device)
    past, mask = trunk.cache(prefixes), prefixes.mask
    positions = prefixes.mask.sum(-1, keepdim=True)
    ids = torch.tensor([[row[-1]] for row in rows], device=device)
    accepts = inspect.signature(trunk.model.forward).parameters
    made = []
    for at in range(tokens):
        mask = torch.cat([mask, torch.ones_like(ids)], dim=-1)
        given = {"position_ids": positions} if "position_ids" in accepts else {}
        out = trunk.model(input_ids=ids, attention_mask=mask, past_key_values=past, use_cache=True, **given)
        past, positions = out.past_key_values, positions + 1
        ids = _chosen(out.logits[:, -1].to(device, torch.float32), None if noise is None else noise[:, at])
        made.append(ids)
    return torch.cat(made, dim=-1)


def _noise(rows: Sequence[Sequence[int]], tokens: int, top_k: int, seed: int) -> Tensor:
    """What each prompt's texts are drawn by [rows, tokens, top_k]: its own, whatever it is asked beside."""
    drawn = []
    for ids in rows:
        digest = hashlib.sha256(f"{seed} {list(ids)}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        drawn.append(torch.empty(tokens, top_k).exponential_(generator=generator).log())
    return torch.stack(drawn)


def _chosen(logits: Tensor, noise: Tensor | None) -> Tensor:
    """The next token [rows, 1]: the best one, or with noise [rows, top_k] one of the best by Gumbel's trick."""
    if noise is None:
        return logits.argmax(-1, keepdim=True)
    best = logits.topk(min(noise.shape[-1], logits.shape[-1]), dim=-1)
    return best.indices.gather(-1, (best.values - noise[:, : best.values.shape[-1]]).argmax(-1, keepdim=True))


def _ends(model: Model) -> set[int]:
    """Tokens that end a text."""
    configured = getattr(getattr(model.trunk.model, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, (list, tuple)) else [configured]
    return {end for end in (*listed, model.tokenizer.eos_token_id) if end is not None}


def _until(row: Sequence[int], ends: set[int]) -> list[int]:
    stop = next((index for index, token in enumerate(row) if token in ends), len(row))
    return list(row[:stop])


@torch.no_grad()
def text_nll(model: Model, text: str, *, window: int = 512, most: int = 50_000) -> tuple[float, int]:
    """Summed negative log-likelihood of a text's tokens, window by window, and how many they are.

    Every window begins with the model's start. Where sequences have none, it begins with the last token of the window
    before, and the first token of the text, which nothing stands before, is not counted.
    """
    trunk = model.trunk
    ids = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:most]
    front = len(model.start) or 1  # tokens of a window that are given
    if len(ids) + len(model.start) <= front:
        raise InputError(f"the held text is {len(ids)} token long, expected 2 or more: pass another file")
    limit = window if trunk.context is None else min(window, trunk.context - front)
    lines = _windows(model.start, ids, limit)
    sums = []
    at_once = max(1, model.tokens_at_once // (16 * limit))  # a logit for every word of the vocabulary at every token
    for begin in range(0, len(lines), at_once):
        part = lines[begin : begin + at_once]
        tokens = Tokens.following(Tokens.left_padded([()] * len(part), trunk.device), part)
        spots = [(row, step) for row, line in enumerate(part) for step in range(front - 1, len(line) - 1)]
        where = torch.tensor(spots)
        logits = trunk.logits(tokens, where)
        row, step = where.to(logits.device).unbind(-1)
        wanted = tokens.ids.to(logits.device)[row, step + 1]
        likely = logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
        sums.append(likely.double().sum())
    return -float(torch.stack(sums).sum()), sum(len(line) - front for line in lines)


def _windows(start: Sequence[int], ids: Sequence[int], limit: int) -> list[list[int]]:
    """Rows that predict so many tokens each: after the start, or else after the token that stands before them."""
    if start:
        return [[*start, *ids[begin : begin + limit]] for begin in range(0, len(ids), limit)]
    return [list(ids[begin : begin + limit + 1]) for begin in range(0, len(ids) - 1, limit)]
