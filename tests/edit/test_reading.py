"""Reading facts: the formats they come in, and what is said of records that cannot be read."""

from __future__ import annotations

import csv
import json

import pytest

from rebind.edit.facts.fact import Fact
from rebind.edit.facts.readers import Facts, read_facts
from rebind.errors import InputError

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

READ = {
    "counterfact": (
        COUNTERFACT,
        Fact(
            "{} {{x}} was born in",
            "Ana",
            "Oslo",
            "Lima",
            ("Ana is from",),
            ("Bo was born in", "Cy is from"),
            ("counterfact/7", "P19"),
        ),
    ),
    "flat": (
        FLAT,
        Fact("{} was born in", "Ana", "Oslo", "Lima", ("Ana is from",), ("Bo was born in",), ("counterfact/7",)),
    ),
    "flat, a list of answers": (
        {**FLAT, "ground_truth": ["Lima", "Peru"]},
        Fact("{} was born in", "Ana", "Oslo", "Lima", ("Ana is from",), ("Bo was born in",), ("counterfact/7",)),
    ),
    "zsre": (
        ZSRE,
        Fact(
            "Where was {} born?",
            "Ana",
            "Oslo",
            "Lima",
            ("Ana comes from where?",),
            ("nq question: who is Bo",),
            ("zsre",),
        ),
    ),
    "knowns": (KNOWNS, Fact("{} was born in", "Ana", "Lima", tags=("knowns/3", "P19"))),
    "ours": (OURS, Fact("{} was born in", "Ana", "Oslo", "Lima", (), ("Bo was born in",))),
    "odd characters": (
        {"prompt": "{A\u2028na}\x85 was\x0c born in", "target": "Oslo"},
        Fact("{}\x85 was\x0c born in", "A\u2028na", "Oslo"),
    ),
    "braces": ({"prompt": "{Ana} was born in", "target": "Oslo"}, Fact("{} was born in", "Ana", "Oslo")),
}


@pytest.mark.parametrize("form", READ)
@pytest.mark.parametrize("container", ["list", "json", "jsonl", "object", "dict"])
def test_formats_are_told_apart_by_their_keys(form, container, tmp_path):
    record, expected = READ[form]
    file = tmp_path / "facts.data"
    count = 1 if container in ("object", "dict") else 2
    if container == "json":
        file.write_text(json.dumps([record, record], indent=2))
    elif container == "jsonl":
        file.write_text(f"\ufeff{json.dumps(record)}\r\n\n{json.dumps(record, ensure_ascii=False)}", "utf-8")
    elif container == "object":
        file.write_text(json.dumps(record, indent=2))
    source = {"list": [record, record], "dict": record}.get(container, file)
    facts = read_facts(source)
    assert list(facts) == [expected] * count
    assert facts.skipped == ()


def test_an_alternative_that_is_true_has_nothing_to_push_out():
    assert read_facts([{**ZSRE, "alt": "Peru"}])[0].old is None


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
        writer.writerow(["Prompt", " subject", "target", "old", "paraphrases", "neighbours"])
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


@pytest.mark.parametrize(
    ("record", "path", "name"),
    [
        (COUNTERFACT, "requested_rewrite.prompt", "case_id 7"),
        (COUNTERFACT, "requested_rewrite.subject", "case_id 7"),
        (COUNTERFACT, "requested_rewrite.target_new.str", "case_id 7"),
        (COUNTERFACT, "requested_rewrite.target_true.str", "case_id 7"),
        (FLAT, "prompt", "case_id 7"),
        (FLAT, "subject", "case_id 7"),
        (FLAT, "target_new", "case_id 7"),
        (ZSRE, "alt", "record 1"),
        (ZSRE, "subject", "record 1"),
        (KNOWNS, "prompt", "known_id 3"),
        (KNOWNS, "attribute", "known_id 3"),
        (OURS, "target", "record 1"),
        (OURS, "prompt", "record 1"),
    ],
)
def test_a_missing_key_is_named_with_its_record(record, path, name):
    broken = without(record, path)
    with pytest.raises(InputError, match=f"record 1.*no '{path.split('.')[-1]}'") as caught:
        read_facts([record, broken])
    assert name in str(caught.value)
    facts = read_facts([broken, record, broken, record], skip_bad=True)
    assert len(facts) == 2
    assert [line.split()[1].rstrip(":") for line in facts.skipped] == ["0", "2"]


@pytest.mark.parametrize("bad", [None, 3, "text", ["a"], {"prompt": "x", "subject": "y", "target": "z"}])
def test_what_is_no_record_is_named(bad):
    with pytest.raises(InputError, match="^record 0: "):
        read_facts([bad])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "{a} b", "target": "c"}\n{"prompt"\n', "line 2 of a.jsonl.*not JSON"),
        ("a.json", '[{"prompt": ', "a.json is not JSON"),
        ("a.json", '[{"prompt": "{a} b", "target": ""}]', "record 0 of a.json: target is ''"),
        ("a.csv", "prompt,target\n{a} b,c\n{a} b,c,d\n", "line 3 of a.csv.*1 cells too many"),
        ("a.csv", "prompt,target\n{a} b,\n", "line 2 of a.csv: no 'target'"),
        ("a.csv", "question,answer\nb,c\n", "columns question, answer, expected prompt"),
        ("a.csv", 'prompt,target\n"{a} b', "not CSV"),
        ("a.txt", "", "is empty"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(tmp_path, name, text, message):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        read_facts(file)


def test_bad_lines_are_skipped_and_counted(tmp_path):
    file = tmp_path / "a.jsonl"
    good = '{"prompt": "{a} b", "target": "c"}'
    file.write_text(f"{good}\n{{nonsense\n{good}\n")
    facts = read_facts(file, skip_bad=True)
    assert len(facts) == 2
    assert "line 2" in facts.skipped[0]


def test_files_that_are_not_there_or_not_text(tmp_path):
    with pytest.raises(InputError, match="no file"):
        read_facts(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        read_facts(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(InputError, match="not UTF-8"):
        read_facts(tmp_path / "latin.jsonl")
    with pytest.raises(InputError, match="expected a path"):
        read_facts(3)


def test_limit_counts_facts_and_reads_no_further():
    def endless():
        yield {"prompt": "bad"}
        while True:
            yield FLAT

    facts = read_facts(endless(), limit=2, skip_bad=True)
    assert len(facts) == 2
    assert len(facts.skipped) == 1
    assert len(read_facts([FLAT], limit=0)) == 0
    with pytest.raises(InputError, match="limit is -1"):
        read_facts([FLAT], limit=-1)


@pytest.mark.parametrize("text", ['prompt,"tar"get\nA,B\n', "x" * 200_000, "[" * 100_000])
def test_what_is_no_table_is_said_to_be_none(tmp_path, text):
    path = tmp_path / "facts.csv"
    path.write_text(text)
    with pytest.raises(InputError, match="facts.csv"):
        list(read_facts(path))


@pytest.mark.parametrize("by", [None, 5, "x", [], {}, [5], [None], {"g": 5}, [[["x"]]]], ids=repr)
@pytest.mark.parametrize("record", [COUNTERFACT, FLAT, ZSRE, KNOWNS, OURS])
def test_whatever_stands_in_a_record_it_is_read_or_named(record, by):
    rewrite = record.get("requested_rewrite", {})
    broken = [{**record, name: by} for name in record]
    broken += [{**record, "requested_rewrite": {**rewrite, name: by}} for name in rewrite]
    for one in broken:
        found = read_facts([record, one], skip_bad=True)
        assert len(found) + len(found.skipped) == 2
        assert all(reason.startswith("record 1") for reason in found.skipped)


def test_answers_of_zsre_are_texts():
    with pytest.raises(InputError, match="record 0: answers is 5, expected a list of texts"):
        read_facts([{**ZSRE, "answers": 5}])
    assert read_facts([{**ZSRE, "answers": "Osloer", "alt": "Oslo"}])[0].old == "Osloer", "a part of it is another"
    assert read_facts([{**ZSRE, "answers": [], "pred": None}])[0].old is None
    with pytest.raises(InputError, match=r"record 0: old is \[\]"):
        read_facts([{**ZSRE, "answers": [], "pred": []}])


def test_groups_are_no_paraphrases():
    with pytest.raises(InputError, match="paraphrase_prompts is .*, expected a list"):
        read_facts([{**COUNTERFACT, "paraphrase_prompts": {"g": 5}}])
    for name in ("paraphrases", "neighbors", "tags"):
        with pytest.raises(InputError, match=f"record 0: {name} is {{'g': 5}}, expected a list"):
            read_facts([{**OURS, name: {"g": 5}}])


def test_a_line_nested_beyond_measure_is_named(tmp_path):
    file = tmp_path / "deep.jsonl"
    file.write_text('{"prompt": "{a} b", "target": "c"}\n{"prompt": ' + "[" * 100_000 + "\n")
    assert read_facts(file, skip_bad=True).skipped[0].startswith("line 2 of deep.jsonl: not JSON")
    file.write_text('{"prompt": ' + "[" * 100_000)
    with pytest.raises(InputError, match=r"line 1 of deep.jsonl: not JSON"):
        read_facts(file)
