"""Write a sequence of key-value pairs into a fast-weight memory, one after another, and record what it holds.

A *pair* names a key and a value; a key that occurs again is overwritten. Each name stands for a direction that depends
only on the name, the seed and the width, so that "Paris" is the same vector in every sequence. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise

import torch
from torch import Tensor

from rebind.errors import FieldError
from rebind.memory import Feature, Rule, get_feature, get_rule, l2_normalize, rule_names

MOST_PAIRS, MOST_WIDTH, MOST_SIMILARITY = 64, 32, 0.95
LARGEST_GATE = 2.0  # of gates without a bound of their own: up to it, unit keys never make a delta rule diverge
FEATURES = ("identity", "elu+1", "dpfp")  # feature maps that are defined for every key and stay narrow
SEPARATORS = ("->", "→", "=", ":")

Gate = float | tuple[float, float]  # a number, or those of the first and the last channel


@dataclass(frozen=True)
class Pair:
    """A key and a value, by name."""

    key: str
    value: str


@dataclass(frozen=True)
class Geometry:
    """How names become vectors."""

    width: int = 16  # d_k and d_v
    similarity: float = 0.0  # cosine that any two keys have in common
    orthogonal: bool = False  # keys at right angles before the similarity is added, instead of random directions
    seed: int = 0

    def keys(self, names: Sequence[str]) -> Tensor:
        """Return unit keys [n, width] for distinct names.

        A key is √s · c + √(1 − s) · u with a direction c that all keys share. With `orthogonal` every u is at right
        angles to c and to the others, so that the cosine of two keys is exactly the similarity s.
        """
        shared, own = self._directions("shared", ["c"]), self._directions("key", names)
        if self.orthogonal:
            room = self.width - (self.similarity > 0)
            if len(names) > room:
                problem = f"There are {len(names)} different keys"
                expected = f"at most {room}, because only so many directions of width {self.width} are orthogonal"
                advice = "Raise the width, or use random directions"
                raise FieldError(problem, field="width", expected=expected, advice=advice, code="too_many_keys")
            basis = torch.cat([shared, own]) if self.similarity > 0 else own
            own = torch.linalg.qr(basis.mT).Q.mT[-len(names) :]
            shared = torch.linalg.qr(shared.mT).Q.mT
        return l2_normalize(self.similarity**0.5 * shared + (1 - self.similarity) ** 0.5 * own)

    def values(self, names: Sequence[str]) -> Tensor:
        """Return unit values [n, width] in random directions."""
        return self._directions("value", names)

    def _directions(self, kind: str, names: Sequence[str]) -> Tensor:
        return l2_normalize(torch.stack([self._direction(f"{kind}/{self.seed}/{name}") for name in names]))

    def _direction(self, name: str) -> Tensor:
        seed = int.from_bytes(sha256(name.encode()).digest()[:7], "big")
        return torch.randn(self.width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Player:
    """A rule with its gates and the feature map of its keys: what a memory is written by."""

    rule: Rule
    gates: Mapping[str, Gate] = field(default_factory=dict)
    feature: str = "identity"

    def features(self, keys: Tensor) -> Tensor:
        """Return the keys [..., d_k] as they meet the matrix, as `rebind.memory.Memory` prepares them."""
        feature: Feature = get_feature(self.feature, keys.shape[-1])
        return l2_normalize(feature.up_to_scale(keys))

    def matrices(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return the memory before the first write and after each: [n + 1, d_v, width of φ]."""
        phi = self.features(keys)
        gates = {name: _gate(gate, phi.shape[-1]) for name, gate in self.gates.items()}
        memory = phi.new_zeros(values.shape[-1], phi.shape[-1])
        memories = [memory]
        for key, value in zip(phi, values, strict=True):
            memory = self.rule.write(key, value, **gates).apply(memory)
            memories.append(memory)
        return torch.stack(memories)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """What one memory holds after each of n writes (row 0: before the first) about each of m distinct keys."""

    matrices: Tensor  # [n + 1, d_v, width of φ]
    errors: Tensor  # [n + 1, m]: ‖Wk − v‖² / ‖v‖² for the latest value v of each key; NaN before its first write
    remains: Tensor  # [n + 1, m]: ⟨Wk − v, u⟩ / ‖u‖² for the value u before the latest one; NaN where there is none
    answers: list[list[str | None]]  # [n + 1][m]: the value nearest to Wk among those written; None for Wk = 0

    def mean_errors(self) -> list[float | None]:
        """Return the mean error over the keys that are stored, after each write."""
        return _numbers(self.errors.nanmean(-1))


@dataclass(frozen=True)
class Script:
    """A sequence of writes, and which value each key should have after each of them."""

    pairs: tuple[Pair, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.pairs) <= MOST_PAIRS:
            problem = f"There are {len(self.pairs)} pairs"
            raise FieldError(problem, field="pairs", expected=f"1 to {MOST_PAIRS}", code="number_of_pairs")

    @property
    def keys(self) -> list[str]:
        """The distinct keys, in the order of their first write."""
        return list(dict.fromkeys(pair.key for pair in self.pairs))

    @property
    def values(self) -> list[str]:
        """The distinct values, in the order of their first write."""
        return list(dict.fromkeys(pair.value for pair in self.pairs))

    def history(self, key: str, writes: int) -> list[str]:
        """Return the values that a key has had after this many writes, the latest one last, repetitions left out."""
        values = [pair.value for pair in self.pairs[:writes] if pair.key == key]
        return [values[0], *(b for a, b in pairwise(values) if a != b)] if values else []

    def latest(self) -> list[list[str | None]]:
        """Return the value that each key should have, before the first write and after each of them."""
        counts = range(len(self.pairs) + 1)
        return [[next(reversed(self.history(key, writes)), None) for key in self.keys] for writes in counts]

    def play(self, player: Player, geometry: Geometry) -> Trajectory:
        """Write all pairs into an empty memory, and read every key after every write."""
        keys, values = geometry.keys(self.keys), geometry.values(self.values)
        key_of, value_of = _index(self.keys), _index(self.values)
        order = [key_of[pair.key] for pair in self.pairs], [value_of[pair.value] for pair in self.pairs]
        matrices = player.matrices(keys[order[0]], values[order[1]])
        read = player.features(keys) @ matrices.mT  # [n + 1, m, d_v]
        errors = torch.full(read.shape[:2], torch.nan, dtype=torch.float64)
        remains = errors.clone()
        answers: list[list[str | None]] = []
        for writes, row in enumerate(read):
            for index, key in enumerate(self.keys):
                history = [values[value_of[name]] for name in self.history(key, writes)]
                if history:
                    excess = row[index] - history[-1]
                    errors[writes, index] = excess.square().sum() / history[-1].square().sum()
                if len(history) > 1:
                    remains[writes, index] = excess @ history[-2] / history[-2].square().sum()
            value_names = list(dict.fromkeys(pair.value for pair in self.pairs[:writes]))
            answers.append(_nearest(row, values[[value_of[name] for name in value_names]], value_names))
        return Trajectory(matrices, errors, remains, answers)

    def forgotten(self, trajectory: Trajectory) -> list[list[int]]:
        """Return after each write the keys, by index, whose answer is nearer to another value than to their own."""
        return [
            [index for index, (should, says) in enumerate(zip(row, answers, strict=True)) if should not in (None, says)]
            for row, answers in zip(self.latest(), trajectory.answers, strict=True)
        ]

    def to_json(self, player: Player, geometry: Geometry) -> dict[str, object]:
        """Return the whole trajectory of one memory for the page; numbers are rounded to what a screen can show."""
        trajectory = self.play(player, geometry)
        return {
            "rule": player.rule.name,
            "matrices": trajectory.matrices.round(decimals=4).tolist(),
            "errors": [_numbers(row) for row in trajectory.errors],
            "remains": [_numbers(row) for row in trajectory.remains],
            "answers": trajectory.answers,
            "forgotten": self.forgotten(trajectory),
            "mean_errors": trajectory.mean_errors(),
        }

    def writes(self) -> list[dict[str, object]]:
        """Return each write with the value that it replaces, if it replaces one."""
        return [
            {"key": pair.key, "value": pair.value, "replaces": replaced}
            for number, pair in enumerate(self.pairs)
            for replaced in [next((name for name in self.history(pair.key, number)[-1:] if name != pair.value), None)]
        ]


def read_pairs(text: str) -> tuple[Pair, ...]:
    """Read one pair per line, such as `France = Paris`; empty lines are skipped."""
    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        separator = next((mark for mark in SEPARATORS if mark in line), None)
        key, _, value = line.partition(separator) if separator else (line, "", "")
        if not key.strip() or not value.strip():
            problem = f"Line {number} is {line.strip()!r}"
            expected = "a key and a value, such as France = Paris"
            raise FieldError(problem, field="pairs", expected=expected, code="not_a_pair")
        pairs.append(Pair(key.strip(), value.strip()))
    return tuple(pairs)


def rules() -> list[Rule]:
    """Return the rules that write one pair per token."""
    return [rule for rule in map(get_rule, rule_names()) if not rule.several]


def read_player(rule: str, gates: Mapping[str, object], feature: str = "identity") -> Player:
    """Return the player with these gates: a number each, or [first, last] for a gate that has channels."""
    match = next((one for one in rules() if one.name == rule), None)
    if match is None:
        raise _invalid("rule", rule, ", ".join(one.name for one in rules()))
    if feature not in FEATURES:
        raise _invalid("feature", feature, ", ".join(FEATURES))
    return Player(match, {name: _read_gate(match, name, gate) for name, gate in gates.items()}, feature)


def _read_gate(rule: Rule, name: str, gate: object) -> Gate:
    if name not in rule.gates:
        raise _invalid("gate", name, ", ".join(rule.gates) or f"no gates with rule {rule.name}")
    ends = gate if isinstance(gate, list) and has_channels(rule, name) and len(gate) == 2 else [gate]
    numbers = [_number(rule, name, one) for one in ends]
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _number(rule: Rule, name: str, value: object) -> float:
    most = largest(rule, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise _invalid(name, value, f"a number from 0 to {most:g}")
    return float(value)


def largest(rule: Rule, gate: str) -> float:
    """Return the largest value that the page offers for a gate."""
    return rule.largest.get(gate, LARGEST_GATE)


def has_channels(rule: Rule, gate: str) -> bool:
    """Return whether a gate decays or scales each key channel by a number of its own."""
    return rule.channels.get(gate) == "key"


def _gate(gate: Gate, width: int) -> float | Tensor:
    """Return a gate as rules take it: a number, or one per channel, from the first to the last in equal steps."""
    return gate if isinstance(gate, float) else torch.linspace(*gate, width, dtype=torch.float64)


def _nearest(read: Tensor, values: Tensor, names: list[str]) -> list[str | None]:
    """Return for each answer [m, d_v] the name of the value with the largest cosine; None for an answer of zero."""
    if not names:
        return [None] * len(read)
    best = (read @ l2_normalize(values).mT).argmax(-1).tolist()
    is_answer = (read.square().sum(-1) > 1e-20).tolist()
    return [names[index] if has_answer else None for index, has_answer in zip(best, is_answer, strict=True)]


def _numbers(row: Tensor) -> list[float | None]:
    """Return numbers for JSON: six digits, and None instead of NaN."""
    return [None if number != number else float(f"{number:.6g}") for number in row.tolist()]


def _index(names: Sequence[str]) -> dict[str, int]:
    return {name: index for index, name in enumerate(names)}


def _invalid(name: str, value: object, expected: str) -> FieldError:
    return FieldError(f"The {name} is {value!r:.40}", field=name, expected=expected, code="invalid_setting")
