"""Reading facts: the formats they come in, and records that cannot be read."""

from __future__ import annotations

import csv
import json

import pytest

from rebind.edit.facts.fact import Fact
from rebind.edit.facts.readers import Facts, read_facts
from rebind.errors import InputError
from tests.support import raises

FRANCE = "The capital of {France} is"
COUNTERFACT = {
    "case_id": 7,
    "requested_rewrite": {
        "prompt": "{} {x} was born in",
        "relation_id": "P19",
        "target_new": {"str": "Oslo"},
        "target_true": {"str": "Lima"},
        "subject": "Ana",
    },
    "paraphrase_prompts": ["Ana is from"],
    "neighborhood_prompts": ["Bo was born in", "Cy is from"],
}
FLAT = {
    "case_id": 7,
    "prompt": "Ana was born in",
    "target_new": "Oslo",
    "subject": "Ana",
    "ground_truth": "Lima",
    "rephrase_prompt": "Ana is from",
    "locality_prompt": "Bo was born in",
    "locality_ground_truth": "Lima",
}
ZSRE = {
    "subject": "Ana",
    "src": "Where was Ana born?",
    "pred": "Lima",
    "rephrase": "Ana comes from where?",
    "alt": "Oslo",
    "answers": ["Lima", "Peru"],
    "loc": "nq question: who is Bo",
    "loc_ans": "nobody",
}
KNOWNS = {
    "known_id": 3,
    "subject": "Ana",
    "attribute": "Lima",
    "template": "{} was born",
    "prediction": " Lima, Peru",
    "prompt": "Ana was born in",
    "relation_id": "P19",
}
OURS = {"prompt": "{} was born in", "subject": "Ana", "target": "Oslo", "old": "Lima", "neighbors": ["Bo was born in"]}

ANA, FROM = ("Ana", "Oslo", "Lima"), ("Ana is from",)
FORMATS = {
    "counterfact": (
        COUNTERFACT,
        Fact("{} {{x}} was born in", *ANA, FROM, ("Bo was born in", "Cy is from"), ("counterfact/7", "P19")),
    ),
    "flat": (FLAT, Fact("{} was born in", *ANA, FROM, ("Bo was born in",), ("counterfact/7",))),
    "flat, a list of answers": (
        {**FLAT, "ground_truth": ["Lima", "Peru"]},
        Fact("{} was born in", *ANA, FROM, ("Bo was born in",), ("counterfact/7",)),
    ),
    "zsre": (
        ZSRE,
        Fact("Where was {} born?", *ANA, ("Ana comes from where?",), ("nq question: who is Bo",), ("zsre",)),
    ),
    "knowns": (KNOWNS, Fact("{} was born in", "Ana", "Lima", tags=("knowns/3", "P19"))),
    "ours": (OURS, Fact("{} was born in", "Ana", "Oslo", "Lima", (), ("Bo was born in",))),
    "odd characters": (
        {"prompt": "{A\u2028na}\x85 was\x0c born in", "target": "Oslo"},
        Fact("{}\x85 was\x0c born in", "A\u2028na", "Oslo"),
    ),
    "braces": ({"prompt": "{Ana} was born in", "target": "Oslo"}, Fact("{} was born in", "Ana", "Oslo")),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("container", ["list", "json", "jsonl", "object", "dict"])
def test_formats_are_recognized_by_their_keys(form, container, tmp_path):
    record, expected = FORMATS[form]
    file = tmp_path / "facts.data"
    texts = {
        "json": json.dumps([record, record], indent=2),
        "jsonl": f"\ufeff{json.dumps(record)}\r\n\n{json.dumps(record, ensure_ascii=False)}",
        "object": json.dumps(record, indent=2),
    }
    file.write_text(texts.get(container, ""), "utf-8")
    facts = read_facts({"list": [record, record], "dict": record}.get(container, file))
    assert list(facts) == [expected] * (1 if container in ("object", "dict") else 2)
    assert facts.skipped == ()


def test_facts_and_pairs_are_read_as_they_are(tmp_path):
    fact = Fact.parse(FRANCE, "Rome")
    assert list(read_facts([fact, (FRANCE, "Rome")])) == [fact, fact]
    assert list(read_facts(fact)) == [fact]
    saved = tmp_path / "ours.jsonl"
    saved.write_text(json.dumps(fact.to_json()) + "\n")
    assert read_facts(str(saved)) == Facts((fact,))
    assert read_facts(saved)[:1] == (fact,)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv(tmp_path, delimiter):
    file = tmp_path / "facts.csv"
    with file.open("w", newline="", encoding="utf-8-sig") as handle:
        writer = csv.writer(handle, delimiter=delimiter)
        writer.writerow(["Prompt", " subject", "target", "old", "paraphrases", "neighbors"])
        writer.writerow(["Ana, 5; was\tborn in", "Ana", "Oslo", "Lima", "Ana is from | From where Ana is,", "Bo"])
        writer.writerow(["{Cy} sa\u2028id\nin", "", "Oslo", "", "", ""])
    assert list(read_facts(file)) == [
        Fact("{}, 5; was\tborn in", "Ana", "Oslo", "Lima", ("Ana is from", "From where Ana is,"), ("Bo",)),
        Fact("{} sa\u2028id\nin", "Cy", "Oslo"),
    ]


def without(record, path):
    first, *rest = path.split(".")
    if not rest:
        return {key: value for key, value in record.items() if key != first}
    return {**record, first: without(record[first], ".".join(rest))}


def refused(source, code, **options):
    with raises(InputError, code) as caught:
        read_facts(source, **options)
    return caught.value.problem


@pytest.mark.parametrize(
    ("record", "path", "name"),
    [
        (COUNTERFACT, "requested_rewrite.prompt", "case_id 7"),
        (COUNTERFACT, "requested_rewrite.target_true.str", "case_id 7"),
        (FLAT, "target_new", "case_id 7"),
        (ZSRE, "subject", "Record 1"),
        (KNOWNS, "attribute", "known_id 3"),
        (OURS, "prompt", "Record 1"),
    ],
)
def test_a_missing_key_is_named_with_its_record(record, path, name):
    broken = without(record, path)
    problem = refused([record, broken], "missing_field")
    assert problem.startswith("Record 1")
    assert name in problem
    assert repr(path.split(".")[-1]) in problem
    facts = read_facts([broken, record, broken, record], skip_bad=True)
    assert len(facts) == 2
    assert [line.split()[1].rstrip(":") for line in facts.skipped] == ["0", "2"]


@pytest.mark.parametrize(
    ("name", "text", "code", "place"),
    [
        ("a.jsonl", '{"prompt": "{a} b", "target": "c"}\n{"prompt"\n', "not_json", "Line 2 of a.jsonl"),
        ("a.jsonl", '{"prompt": ' + "[" * 100_000, "not_json", "Line 1 of a.jsonl"),
        ("a.json", '[{"prompt": ', "not_json", "a.json"),
        ("a.json", '[{"prompt": "{a} b", "target": ""}]', "empty_text", "Record 0 of a.json"),
        ("a.csv", "prompt,target\n{a} b,c\n{a} b,c,d\n", "too_many_cells", "Line 3 of a.csv"),
        ("a.csv", "prompt,target\n{a} b,\n", "missing_field", "Line 2 of a.csv"),
        ("a.csv", "question,answer\nb,c\n", "unknown_columns", "a.csv"),
        ("a.csv", 'prompt,target\n"{a} b', "not_csv", "a.csv"),
        ("a.txt", "", "empty_file", "a.txt"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(tmp_path, name, text, code, place):
    (tmp_path / name).write_text(text)
    assert place in refused(tmp_path / name, code)


def test_bad_lines_are_skipped_and_counted(tmp_path):
    file = tmp_path / "a.jsonl"
    good = '{"prompt": "{a} b", "target": "c"}'
    file.write_text(f"{good}\n{{nonsense\n{good}\n")
    facts = read_facts(file, skip_bad=True)
    assert len(facts) == 2
    assert facts.skipped[0].startswith("Line 2")
    assert facts.names == ("line 1 of a.jsonl", "line 3 of a.jsonl")


def test_sources_that_are_not_facts(tmp_path):
    refused(tmp_path / "none.jsonl", "file_not_found")
    refused(tmp_path, "unreadable_file")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    refused(tmp_path / "latin.jsonl", "unreadable_file")
    refused(3, "not_facts")
    (tmp_path / "one.jsonl").write_text('{"prompt": "no subject", "target": "Rome"}\n')
    assert refused(tmp_path / "one.jsonl", "no_subject").startswith("Line 1 of one.jsonl: ")
    for field, value in (("paraphrase", ["France is ruled from"]), ("neighbours", [])):
        assert field in refused([{"prompt": FRANCE, "target": "Rome", field: value}], "misspelled_field")
    for bad in (None, 3, "text", ["a"]):
        assert refused([bad], "not_a_fact").startswith("Record 0: ")


def test_the_limit_counts_facts_and_ends_reading():
    def endless():
        yield {"prompt": "bad"}
        while True:
            yield FLAT

    facts = read_facts(endless(), limit=2, skip_bad=True)
    assert len(facts) == 2
    assert len(facts.skipped) == 1
    assert len(read_facts([FLAT], limit=0)) == 0
    refused([FLAT], "negative_limit", limit=-1)


@pytest.mark.parametrize("value", [None, 5, "x", [], {}, [5], [None], {"g": 5}, [[["x"]]]], ids=repr)
@pytest.mark.parametrize("record", [COUNTERFACT, FLAT, ZSRE, KNOWNS, OURS])
def test_a_record_with_any_value_is_read_or_named(record, value):
    rewrite = record.get("requested_rewrite", {})
    broken = [{**record, name: value} for name in record]
    broken += [{**record, "requested_rewrite": {**rewrite, name: value}} for name in rewrite]
    for one in broken:
        facts = read_facts([record, one], skip_bad=True)
        assert len(facts) + len(facts.skipped) == 2
        assert all(reason.startswith("Record 1") for reason in facts.skipped)


def test_answers_of_zsre_are_texts():
    assert read_facts([{**ZSRE, "alt": "Peru"}])[0].old is None, "a true answer has nothing to push out"
    refused([{**ZSRE, "answers": 5}], "not_a_list")
    assert read_facts([{**ZSRE, "answers": "Osloer", "alt": "Oslo"}])[0].old == "Osloer", "a part of it is another"
    assert read_facts([{**ZSRE, "answers": [], "pred": None}])[0].old is None
    refused([{**ZSRE, "answers": [], "pred": []}], "not_text")
