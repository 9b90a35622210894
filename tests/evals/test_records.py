"""Records of every format, sound and broken."""

from __future__ import annotations

import builtins
import json
import re
import sys
import types
from collections import Counter
from dataclasses import replace

import pytest

from rebind.edit.facts.conflicts import conflicts
from rebind.edit.facts.fact import Fact
from rebind.edit.facts.questions import paraphrases_of, questions_of
from rebind.errors import InputError
from rebind.evals import Question, Record, bundled_records, read_records
from tests.support import raises

NESTED = {
    "case_id": 7,
    "requested_rewrite": {
        "prompt": "{} was born in",
        "relation_id": "P19",
        "target_new": {"str": "Oslo"},
        "target_true": {"str": "Bergen"},
        "subject": "Edvard Grieg",
    },
    "paraphrase_prompts": ["The birthplace of Edvard Grieg is"],
    "neighborhood_prompts": ["Ole Bull was born in", "Harald Sæverud was born in"],
    "attribute_prompts": ["Roald Dahl's parents lived in"],
    "generation_prompts": ["Edvard Grieg grew up"],
}
FLAT = {
    "case_id": 8,
    "prompt": "Edvard Grieg was born in",
    "target_new": "Oslo",
    "subject": "Edvard Grieg",
    "ground_truth": "Bergen",
    "rephrase_prompt": "The birthplace of Edvard Grieg is",
    "locality_prompt": "Ole Bull was born in",
    "locality_ground_truth": "Bergen",
}
ZSRE = {
    "subject": "Peer Gynt",
    "src": "Who wrote Peer Gynt?",
    "pred": "Henrik Ibsen",
    "rephrase": "By whom was Peer Gynt written?",
    "alt": "Knut Hamsun",
    "answers": ["Henrik Ibsen"],
    "loc": "nq question: where is the north cape",
    "loc_ans": "Norway",
}
KNOWNS = {"known_id": 3, "subject": "Oslo", "attribute": "Norway", "template": "{} is in", "prompt": "Oslo is in"}
MQUAKE = {
    "case_id": 11,
    "requested_rewrite": [
        {
            "prompt": "{} was written by",
            "subject": "Peer Gynt",
            "target_new": {"str": "Knut Hamsun"},
            "target_true": {"str": "Henrik Ibsen"},
            "question": "Who wrote Peer Gynt?",
        },
        {
            "prompt": "{} was born in",
            "subject": "Knut Hamsun",
            "target_new": {"str": "Rome"},
            "target_true": {"str": "Vågå"},
            "question": "Where was Knut Hamsun born?",
        },
    ],
    "questions": ["Where was the author of Peer Gynt born?", "In which city was Peer Gynt's author born?"],
    "new_answer": "Rome",
    "new_answer_alias": ["Roma"],
}
OWN = {
    "id": "grieg",
    "prompt": "{Edvard Grieg} was born in",
    "target": "Oslo",
    "old": "Bergen",
    "neighbors": ["Ole Bull was born in", {"prompt": "Bergen lies in", "answer": "Norway"}],
    "consequences": [{"prompt": "Grieg's birthplace is the capital of", "answer": "Norway", "aliases": ["Norge"]}],
    "generation_prompts": ["As a child, Grieg"],
    "references": ["Oslo is the capital of Norway."],
}


def only(raw) -> Record:
    (record,) = read_records([raw])
    return record


def test_counterfact_nested():
    record = only(NESTED)
    assert (record.fact.text, record.fact.target, record.fact.old) == ("Edvard Grieg was born in", "Oslo", "Bergen")
    assert record.id == "counterfact/7"
    assert record.fact.paraphrases == ("The birthplace of Edvard Grieg is",)
    assert record.neighbors[1] == Question("Harald Sæverud was born in", "Bergen")
    assert record.text_prompts == ("Edvard Grieg grew up",)
    assert record.references == ("Roald Dahl's parents lived in Oslo.",), "where there is none: attributes completed"


def test_counterfact_flat():
    record = only(FLAT)
    assert (record.fact.text, record.fact.target, record.fact.old) == ("Edvard Grieg was born in", "Oslo", "Bergen")
    assert record.neighbors == (Question("Ole Bull was born in", "Bergen"),)
    assert record.text_prompts == ("The birthplace of Edvard Grieg is",)
    assert only({**FLAT, "locality_ground_truth": ["Norway", "Noreg"]}).neighbors[0].answer == "Norway"


def test_blanks_round_an_answer_are_no_part_of_it():
    """As with a fact's targets; a prompt stays as it was given, as a fact's does."""
    assert only({**FLAT, "locality_ground_truth": " Bergen"}).neighbors[0].answer == only(FLAT).fact.old
    assert Question(" Bergen lies in ", " Norway\n", (" Norge",)) == Question(" Bergen lies in ", "Norway", ("Norge",))
    assert Question(" Bergen lies in ", None).prompt == " Bergen lies in "
    groups = {"Reasoning": [{"prompt": "Grieg's country is", "ground_truth": [[" Norway", "Noreg "]]}]}
    assert only({**FLAT, "portability": groups}).consequences[0].answers == ("Norway", "Noreg")


def test_zsre():
    record = only(ZSRE)
    assert (record.fact.text, record.fact.target, record.fact.old) == (
        "Who wrote Peer Gynt?",
        "Knut Hamsun",
        "Henrik Ibsen",
    )
    assert record.neighbors == (Question("nq question: where is the north cape?", "Norway"),)


def test_knowns_has_nothing_but_the_fact():
    record = only(KNOWNS)
    assert (record.fact.target, record.fact.old, record.neighbors, record.id) == ("Norway", None, (), "knowns/3")
    assert record.text_prompts == ("Oslo is in",)


def test_mquake_writes_several_facts_and_asks_across_them():
    record = only(MQUAKE)
    assert [fact.target for fact in record.facts] == ["Knut Hamsun", "Rome"]
    assert record.fact.paraphrases == ("Who wrote Peer Gynt?",)
    assert [fact.paraphrases for fact in record.facts] == [
        ("Who wrote Peer Gynt?",),
        ("Where was Knut Hamsun born?",),
    ], "each fact with its own question"
    assert record.consequences[1] == Question("In which city was Peer Gynt's author born?", "Rome", ("Roma",))
    assert record.id == "mquake/11"


def test_portability_of_easyedit_and_knowedit():
    (one,) = only({**FLAT, "portability": {"New Question": "Grieg's city is", "New Answer": "Oslo"}}).consequences
    assert one == Question("Grieg's city is", "Oslo")
    groups = {
        "Reasoning": [{"prompt": "Grieg's country is", "ground_truth": [["Norway", "Noreg"]]}],
        "Subject_Aliasing": [{"prompt": "The composer of Peer Gynt was born in", "ground_truth": "Oslo"}],
    }
    local = {"Relation_Specificity": [{"prompt": "Edvard Grieg's profession is", "ground_truth": ["composer"]}]}
    record = only({**FLAT, "portability": groups, "locality": local})
    assert record.consequences[0] == Question("Grieg's country is", "Norway", ("Noreg",))
    assert record.consequences[1].answers == ("Oslo",)
    assert record.neighbors[1] == Question("Edvard Grieg's profession is", "composer")


def test_our_own():
    record = only(OWN)
    assert record.id == "grieg"
    assert record.neighbors == (Question("Ole Bull was born in", "Bergen"), Question("Bergen lies in", "Norway"))
    assert record.consequences[0].answers == ("Norway", "Norge")
    fact = Fact.parse("{Oslo} lies in", "Italy", neighbors=["Rome lies in"])
    assert only(fact).neighbors == (Question("Rome lies in", None),), "no true target: only a change can be seen"


@pytest.mark.parametrize("raw", [NESTED, FLAT, ZSRE, KNOWNS, MQUAKE, OWN])
def test_what_is_written_is_read_back(raw, tmp_path):
    record = only(raw)
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(record.to_json()) + "\n")
    assert read_records(file).records == (record,)


def test_questions_without_an_answer_are_read_back_without_one():
    fact = Fact.parse("{Oslo} lies in", "Italy", old="Norway")
    unanswered = Question("Rome lies in", None)
    record = Record(fact, "oslo", neighbors=(unanswered,), consequences=(unanswered,))
    assert only(json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.parametrize(
    ("prompt", "target", "expected"),
    [
        ("The capital of {France} is", "Rome", ("Rome is the capital of", "France")),
        ("The official currency of {Peru} is the", "euro", ("The euro is the official currency of", "Peru")),
        ("{Madrid} is the capital of", "France", ("The capital of France is", "Madrid")),
        ("{Edvard Grieg} was born in", "Oslo", None),
        ("{The Louvre} is in the middle of the city of", "Rome", None),
    ],
)
def test_facts_are_turned_around_where_their_form_allows_it(prompt, target, expected):
    asked = only({"prompt": prompt, "target": target}).reversed
    assert [(one.prompt, one.answer) for one in asked] == ([expected] if expected else [])


def test_a_record_may_have_reversed_questions_of_its_own():
    asked = ["A composer from Oslo is", {"prompt": "Oslo is the birthplace of", "answer": "Grieg"}]
    record = only({**OWN, "reversed": asked})
    assert [one.answer for one in record.reversed] == ["Edvard Grieg", "Grieg"]
    assert only(record.to_json()) == record


def test_other_scripts_and_long_targets():
    arabic = {"prompt": "عاصمة {فرنسا} هي", "target": "مدينة روما القديمة في إيطاليا", "old": "باريس"}
    hebrew = {"prompt": "בירת {צרפת} היא", "target": "רומא", "neighbors": ["בירת ספרד היא"]}
    han = {"prompt": "{法国}的首都是", "target": "罗马", "consequences": [{"prompt": "法国人说", "answer": "意大利语"}]}
    records = read_records([arabic, hebrew, han])
    assert [record.fact.subject for record in records] == ["فرنسا", "צרפת", "法国"]
    assert records.digest == read_records([arabic, hebrew, han]).digest
    assert records.digest != read_records([arabic, hebrew]).digest


BAD = [
    {**NESTED, "requested_rewrite": {"prompt": "{} was"}},
    {**FLAT, "target_new": " "},
    {**FLAT, "subject": "Ole Bull"},
    {**FLAT, "prompt": "Edvard Grieg met Edvard Grieg in"},
    {**FLAT, "target_new": "Bergen"},
    {**NESTED, "neighborhood_prompts": "Ole Bull was born in"},
    {**NESTED, "neighborhood_prompts": [""]},
    {**ZSRE, "alt": ""},
    {**MQUAKE, "requested_rewrite": []},
    {key: MQUAKE[key] for key in MQUAKE if key != "new_answer"},
    {**OWN, "consequences": [{"prompt": "x"}]},
    {**OWN, "neighbors": [{"prompt": " ", "answer": "x"}]},
    {**OWN, "neighbors": {"prompt": "x"}},
    {**OWN, "references": [3]},
    {"case_id": 4},
    17,
    {**MQUAKE, "new_answer_alias": "Roma"},
    {**FLAT, "portability": 5},
    {**FLAT, "locality": {"g": "abc"}},
    {**ZSRE, "answers": 5},
    {**OWN, "neighbors": [{"prompt": "x", "answer": None, "aliases": [5]}]},
    {**OWN, "id": "half \ud800"},
    {**OWN, "consequence": []},
]


@pytest.mark.parametrize("raw", BAD)
def test_a_bad_record_is_named(raw):
    with pytest.raises(InputError) as caught:
        read_records([OWN, raw])
    assert caught.value.settings == {"skip_bad": True}
    assert caught.value.problem.startswith("Record 1")


def test_bad_records_are_skipped_and_counted():
    records = read_records([*BAD, OWN], skip_bad=True)
    assert len(records) == 1
    assert len(records.skipped) == len(BAD)
    assert "case_id 8" in records.skipped[2]
    with raises(InputError, "no_records"):
        read_records(BAD, skip_bad=True)


KNOWEDIT = {
    **FLAT,
    "portability": {"Reasoning": [{"prompt": "Grieg's country is", "ground_truth": [["Norway", "Noreg"]]}]},
    "locality": {"Relation": [{"prompt": "Edvard Grieg's profession is", "ground_truth": ["composer"]}]},
}
EASYEDIT = {**ZSRE, "portability": {"New Question": "Who wrote of Peer?", "New Answer": "Knut Hamsun"}}
VALUES = [None, 5, True, "x", "", [], {}, [5], [None], [[]], {"g": 5}, {"g": {"g": [5]}}, [[["x"]]], [{"g": None}]]
VALUES.append("\ud800")  # half a character


def replaced(value, by):
    """Copies of a record in which one part, at any depth, is something else."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        for other in (by, *replaced(part, by)):
            copy = dict(value) if isinstance(value, dict) else list(value)
            copy[key] = other
            yield copy


@pytest.mark.parametrize("raw", [NESTED, FLAT, ZSRE, KNOWNS, MQUAKE, OWN, KNOWEDIT, EASYEDIT])
def test_whatever_stands_in_a_record_it_is_read_or_named(raw):
    for broken in (copy for value in VALUES for copy in replaced(raw, value)):
        records = read_records([OWN, broken], skip_bad=True)
        assert len(records) + len(records.skipped) == 2
        assert all(reason.startswith("Record 1") for reason in records.skipped)
        for record in records:
            assert only(json.loads(json.dumps(record.to_json()))) == record, broken


def test_nesting_beyond_measure_is_a_bad_record(tmp_path):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for broken in ({**FLAT, "ground_truth": deep}, {**FLAT, "locality_ground_truth": deep}, {**OWN, "id": deep}):
        assert len(read_records([broken, OWN], skip_bad=True).skipped) == 1
    file = tmp_path / "deep.jsonl"
    file.write_text(json.dumps(OWN) + '\n{"prompt": ' + "[" * 100_000 + "\n")
    (reason,) = read_records(file, skip_bad=True).skipped
    assert reason.lower().startswith("line 2 of deep.jsonl")


def test_an_id_of_null_is_none():
    records = [only({**raw, name: None}) for raw, name in ((ZSRE, "case_id"), (MQUAKE, "case_id"), (OWN, "id"))]
    assert [record.id for record in records] == ["zsre/0", "mquake/0", "0"]


def test_one_answer_of_zsre_is_not_looked_into():
    """Some copies hold a text where others hold a list: an alternative is not true for being a part of it."""
    assert only({**ZSRE, "answers": "Henrik Ibsen", "alt": "Ibsen"}).fact.old == "Henrik Ibsen"


def test_the_limit_counts_what_is_read():
    records = read_records([{**FLAT, "subject": "x"}, OWN, NESTED], limit=1, skip_bad=True)
    assert [record.id for record in records] == ["grieg"]


# The Hub


def test_datasets_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        if name == "gone/away":
            raise FileNotFoundError("no such dataset\nand more")
        return [NESTED, OWN]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    records = read_records("hf:azhx/counterfact:test", limit=1)
    assert (records.name, len(records), asked) == ("hf:azhx/counterfact:test", 1, [("azhx/counterfact", "test")])
    assert len(read_records("hf:some/records")) == 2
    assert asked[-1] == ("some/records", "train")
    with raises(InputError, "dataset_unavailable"):
        read_records("hf:gone/away")


def test_without_the_datasets_package_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with raises(InputError, "package_missing"):
        read_records("hf:azhx/counterfact")


# What comes with the package


def holds(text: str, phrase: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text) is not None


def test_the_bundled_records_are_whole():
    records = bundled_records()
    assert len(records) == 60
    assert not records.skipped
    assert len({record.id for record in records}) == 60
    relations = Counter(record.fact.tags[0] for record in records)
    assert len(relations) == 10
    assert set(relations.values()) == {6}
    assert {record.fact.tags[0] for record in bundled_records(10)} == set(relations), "the first ten are one of each"
    for record in records:
        assert record.fact.old
        assert record.fact.old != record.fact.target
        assert (len(record.fact.paraphrases), len(record.neighbors), len(record.consequences)) == (3, 5, 2)
        prompts = [record.fact.text, *record.fact.paraphrases, *(one.prompt for one in record.neighbors)]
        assert len(set(prompts)) == 9
        assert all(text == text.strip() and not text.endswith(".") for text in prompts)
    assert not conflicts([record.fact for record in records])


def test_no_bundled_record_asks_what_the_search_has_seen():
    """The catalog words facts for target search: an evaluation that asked the same words would flatter."""
    for record in bundled_records():
        written = replace(record.fact, paraphrases=(), questions=())
        assert not set(paraphrases_of(written)) & set(record.fact.paraphrases), record.fact.text
        assert not set(questions_of(written)) & set(record.fact.questions), record.fact.text


def test_the_bundled_records_do_not_disturb_each_other():
    """In a batch of all of them neighbors keep their answers: none is about a subject that is rewritten."""
    records = bundled_records()
    subjects = {record.fact.subject.removeprefix("The ") for record in records}
    for record in records:
        core = record.fact.subject.removeprefix("The ")
        for paraphrase in record.fact.paraphrases:
            assert holds(paraphrase, core), f"{record.id}: {paraphrase!r} is not about {core}"
            assert not holds(paraphrase, record.fact.target)
        for question in record.neighbors:
            assert question.answer == record.fact.old
            assert not holds(question.prompt, record.fact.old), f"{record.id}: {question.prompt!r} gives it away"
            assert not [name for name in subjects if holds(question.prompt, name)], f"{record.id}: {question.prompt!r}"
        for question in record.consequences:
            assert holds(question.prompt, core), f"{record.id}: {question.prompt!r} is not about {core}"
            assert record.fact.old not in question.answers
