"""`LanguageModel`: a causal language model with its tokenizer; encode, score, generate."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rebind.errors import InputError
from rebind.models.batching import tokens_per_batch
from rebind.models.generation import continue_prompts, sample
from rebind.models.load import load_pretrained
from rebind.models.prompts import EncodedPrompt, Prompt, decode_continuation, encode_prompts, start_tokens
from rebind.models.scoring import FactScore, score_prompts
from rebind.models.sites import Site, find_sites, module_at
from rebind.models.tokens import Tokens
from rebind.models.trunk import Trunk
from rebind.models.weights.fingerprint import fingerprint, fingerprint_of_files


class LanguageModel:
    """A causal language model in eval mode, its tokenizer, and the way a prompt is tokenized.

    Attributes:
        model: the model of transformers.
        tokenizer: its fast tokenizer.
        name: what the model was loaded as: "smollm2", a Hub id, or the name of a folder or file.
        start: the start tokens, token ids that belong before every prompt.
        chat: whether prompts go into the chat template of the tokenizer.
    """

    model: Any
    tokenizer: Any

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "",
        start: Sequence[int] | None = None,
        chat: bool = False,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.name = name or model.config._name_or_path or model.config.model_type
        self.start = start_tokens(tokenizer) if start is None else tuple(start)
        self.chat = chat

    @classmethod
    def load(
        cls,
        spec: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        device_map: str | dict[str, Any] | None = None,
    ) -> LanguageModel:
        """Load a model.

        Args:
            spec: "smollm2" (the embedded default), a GGUF file, a folder in Hugging Face format or one that
                `rebind train` wrote (its newest checkpoint), a Hub id (downloaded if it is not in the Hub's cache),
                or a loaded model.
            tokenizer: a fast tokenizer. Required with a loaded model; by default the one beside the weights.
            dtype: by default the dtype that the weights are stored in.
            device: by default the CPU.
            device_map: spreads the model over devices, as in `from_pretrained`; use it instead of `device`.
        """
        model, loaded_tokenizer, name = load_pretrained(
            spec, tokenizer, dtype=dtype, device=device, device_map=device_map
        )
        loaded = cls(model, loaded_tokenizer, name=name)
        folder = Path(model.config._name_or_path)
        offloaded = any(parameter.is_meta for parameter in model.parameters())
        if not isinstance(spec, PreTrainedModel) and not offloaded and folder.is_dir():
            loaded.fingerprint = fingerprint_of_files(model, folder)
        return loaded

    def with_chat(self, chat: bool) -> LanguageModel:
        """Return the same model, with prompts in the chat template or not."""
        other = copy.copy(self)
        other.chat = chat
        return other

    # Properties of the model

    @cached_property
    def sites(self) -> list[Site]:
        """The site of every layer. Raises an error that says why if the model cannot be edited."""
        return find_sites(self.model)

    @cached_property
    def trunk(self) -> Trunk:
        """The model as it runs in pieces: it can stop early, resume at a layer, and share prefixes."""
        trunk = Trunk(self.model, [module_at(self.model, site.block) for site in self.sites])
        trunk.probe()
        return trunk

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the weights, computed when it is first read: read it before the first edit."""
        return fingerprint(self.model)

    @property
    def device(self) -> torch.device:
        """The device of the input embeddings, where token ids belong."""
        return self.trunk.device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def context_length(self) -> int | None:
        """The longest sequence the model takes, where its config says so."""
        return self.trunk.context_length

    @property
    def base_name(self) -> str:
        """A name that other programs can load the model by: a Hub id, or the folder it came from."""
        folder = Path(str(getattr(self.model.config, "_name_or_path", "")))
        is_local = "/" not in self.name and folder.is_dir() and str(folder) != "."
        return str(folder.resolve()) if is_local else self.name

    @property
    def adds_start(self) -> bool:
        """Whether the tokenizer itself puts the start tokens in front of a text."""
        return tuple(self.tokenizer("a")["input_ids"][: len(self.start)]) == self.start

    @property
    def start_text(self) -> str:
        """The start tokens as text for other programs; empty where the tokenizer itself puts them in front."""
        return "" if self.adds_start else "".join(self.tokenizer.convert_ids_to_tokens(list(self.start)))

    # Encode, score, generate

    def encode(
        self,
        prompts: Sequence[Prompt],
        *,
        context: str = "",
        start: bool = True,
        targets: Sequence[tuple[int, ...]] | None = None,
        truncate: bool = False,
    ) -> list[EncodedPrompt]:
        """Return the tokens of each prompt, behind the start tokens and `context`; see `encode_prompts`.

        With `truncate`, a prompt may be longer than the context length.
        """
        in_template = [prompt.in_chat() for prompt in prompts] if self.chat else prompts
        opening, limit = self.start if start else (), None if truncate else self.context_length
        return encode_prompts(in_template, self.tokenizer, opening, context=context, limit=limit, targets=targets)

    def score(self, prompts: Sequence[Prompt], *, batch_tokens: int | None = None) -> list[FactScore]:
        """Score how strongly the model believes the target of each prompt."""
        return self.score_encoded(self.encode(prompts), batch_tokens=batch_tokens)

    def score_encoded(self, prompts: Sequence[EncodedPrompt], *, batch_tokens: int | None = None) -> list[FactScore]:
        """Score how strongly the model believes the target of each prompt, which may be in any framing."""
        return score_prompts(self.trunk, self.tokenizer, prompts, batch_tokens=batch_tokens)

    @torch.no_grad()
    def next_token_log_probs(self, prompts: Sequence[str], *, truncate: bool = False) -> Tensor:
        """Return the log-probabilities of the token after each prompt, [n, vocabulary].

        With `truncate`, a prompt longer than the context length is truncated; otherwise it is an error.
        """
        encoded = self.encode([Prompt(prompt) for prompt in prompts], truncate=truncate)
        rows = [prompt.ids[: self.context_length] for prompt in encoded]
        last = torch.tensor([(row, len(ids) - 1) for row, ids in enumerate(rows)], device=self.device)
        return torch.log_softmax(self.trunk.logits(Tokens.right_padded(rows, self.device), last), dim=-1)

    def generate(self, prompts: Sequence[str], tokens: int, *, top_k: int | None = None, seed: int = 0) -> list[str]:
        """Continue each prompt greedily, or by sampling from the `top_k` most likely tokens."""
        encoded = self.encode([Prompt(prompt) for prompt in prompts])
        return self.generate_encoded(encoded, tokens, top_k=top_k, seed=seed)

    def generate_encoded(
        self, prompts: Sequence[EncodedPrompt], tokens: int, *, top_k: int | None = None, seed: int = 0
    ) -> list[str]:
        """Continue each encoded prompt, which may be in any framing, as `generate` does."""
        new = continue_prompts(self.trunk, prompts, tokens, top_k=top_k, seed=seed, end_tokens=self.end_tokens)
        return [decode_continuation(self.tokenizer, prompt.ids, ids) for prompt, ids in zip(prompts, new, strict=True)]

    def sample(self, first: Tensor, length: int, *, seed: int, top_k: int | None = None) -> Tensor:
        """Continue each row of token ids `first` [rows, tokens] to `length` tokens by sampling: [rows, length]."""
        return sample(self.model, self.start, first, length, seed=seed, top_k=top_k)

    def text_nll(self, text: str, *, window: int = 512, max_tokens: int = 50_000) -> tuple[float, int]:
        """Return the summed negative log-likelihood of the first `max_tokens` of a text, and how many tokens it counts.

        The text is read in windows. Each begins with the start tokens. A model without start tokens reads the last
        token of the previous window instead, and the first token of the text is not counted.
        """
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:max_tokens]
        front = len(self.start) or 1  # tokens of a window that are not predicted
        length = window if self.context_length is None else min(window, self.context_length - front)
        if self.start:
            rows = [(*self.start, *ids[begin : begin + length]) for begin in range(0, len(ids), length)]
        else:
            rows = [tuple(ids[begin : begin + length + 1]) for begin in range(0, len(ids) - 1, length)]
        if not rows:
            raise InputError(f"The text is {len(ids)} tokens long", expected="2 tokens or more", code="text_too_short")
        windows = [EncodedPrompt(row[:front], 0, row[front:]) for row in rows]
        # Every token has logits over the whole vocabulary.
        batch = max(1, tokens_per_batch(self.trunk) // (16 * length))
        scores: list[FactScore] = []
        for begin in range(0, len(windows), batch):
            scores += self.score_encoded(windows[begin : begin + batch])
        return math.fsum(score.nll * score.tokens for score in scores), sum(score.tokens for score in scores)

    @cached_property
    def word_parts(self) -> Tensor:
        """For every token id, whether it continues the word before it instead of beginning a new one, [vocabulary]."""
        ids = range(len(self.tokenizer))
        names = self.tokenizer.convert_ids_to_tokens(list(ids))
        texts = self.tokenizer.batch_decode([[id] for id in ids])
        parts = torch.zeros(self.model.get_output_embeddings().weight.shape[0], dtype=torch.bool)
        special = set(self.tokenizer.all_special_ids)
        for id, name, text in zip(ids, names, texts, strict=True):
            begins_word = name.startswith(("Ġ", "▁")) or id in special
            if id < len(parts) and not begins_word and text[:1].isalnum():
                parts[id] = True
        return parts.to(self.device)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a text."""
        configured = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        ends = configured if isinstance(configured, (list, tuple)) else [configured]
        return frozenset(end for end in (*ends, self.tokenizer.eos_token_id) if end is not None)
