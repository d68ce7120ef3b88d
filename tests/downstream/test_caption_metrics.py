"""Caption scores compared with pycocoevalcap's own pipeline, with and without Java."""

from __future__ import annotations

import json
import os
import shutil
import stat

import numpy as np
import pycocoevalcap.eval as official
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocoevalcap.cider.cider import Cider
from pycocotools.coco import COCO

from lavis_mafa.downstream import caption_metrics as scoring
from lavis_mafa.downstream.caption_metrics import (
    PTB,
    PYTHON,
    STANDARD,
    References,
    Tools,
    _python_tokens,
    as_id,
    find_tools,
    read_references,
    score_captions,
    tokens_of,
)

needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java here")
IN_PYTHON = Tools(("bleu", "rouge", "cider"), PYTHON)

REFERENCES = {
    1: ["A black dog runs over the grass.", "a dog is running on a lawn", "dog, running"],
    2: ["Two children play in the sand.", "kids playing at the beach"],
    3: ["A man on a red bicycle", "A cyclist rides down the street."],
    4: ["A brown horse stands in a field", "a horse on the grass"],
    5: ["People sit at a table.", "A family eats dinner at a table"],
    6: ["A red bus on the street", "the bus drives down a street."],
}
CAPTIONS = {
    1: "a dog runs over the grass",
    2: "two kids in the sand",
    3: "a man rides a bicycle down the street",
    4: "a dog in a field",
    5: "people eat at a table",
    6: "a red bus drives down the street",
}
DOMAINS = {1: "in", 2: "in", 3: "near", 4: "near", 5: "out", 6: "out"}


def coco_file(path, references=REFERENCES, domains=None):
    """Write references in COCO's format; ``domains``: the image domains that NoCaps adds."""
    content = {
        "images": [{"id": i, **({"domain": domains[i]} if domains else {})} for i in references],
        "annotations": [
            {"id": 10 * i + k, "image_id": i, "caption": text}
            for i, texts in references.items()
            for k, text in enumerate(texts)
        ],
    }
    path.write_text(json.dumps(content))
    return path


def fake_java(folder, script):
    """Create a fake ``java`` and return a PATH that contains only it."""
    program = folder / "java"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return str(folder)


# Tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("A man's dog isn't big.", "a man 's dog is n't big"),
        ('a sign "stop", red; big - and -- new!', "a sign stop red big and new"),
        ("a well-known T-shirt (really)", "a well-known t-shirt -lrb- really -rrb-"),
        ("it costs $5.50 at 10:30", "it costs $ 5.50 at 10:30"),
        ("We cannot, they'll", "we can not they 'll"),
        ("the U.S. flag", "the u.s. flag"),
        ("a café", "a café"),
        ("हिन्दी में", "हिन्दी में"),
        ("", ""),
    ],
)
def test_python_tokens(text, tokens):
    assert _python_tokens(text) == tokens


@needs_java
def test_python_tokens_equal_the_penn_treebanks():
    texts = [*CHINESE, *(t for several in REFERENCES.values() for t in several)]
    texts += [
        "A man's dog isn't big.",
        'a "stop" sign',
        "T-shirts (3 of them)",
        "1,000 cats & dogs",
    ]
    numbered = {i: [text] for i, text in enumerate(texts)}
    # A line separator in a caption must not shift those after it.
    numbered |= {98: ["a\u2028b", "c\rd"], 99: ["e\nf\x85g"]}
    assert tokens_of(numbered, PYTHON) == tokens_of(numbered, PTB)
    assert tokens_of(numbered, PTB)[99] == ["e f g"]


@given(st.text())
def test_python_tokens_are_lower_case_without_punctuation(text):
    tokens = _python_tokens(text).split(" ")
    assert not set(tokens) & (scoring._REMOVED | {"(", ")"})
    assert all(token == token.lower() for token in tokens)
    assert _python_tokens(text) == _python_tokens(f"  {text}\n")


# Scores


class NoMetric:
    """Replaces a metric that the official pipeline must skip."""

    def compute_score(self, truths, texts):
        return 0.0, [0.0] * len(truths)

    def method(self):
        return "none"


def official_scores(tmp_path, monkeypatch, without=("Meteor", "Spice"), image_ids=None):
    for name in without:
        monkeypatch.setattr(official, name, NoMetric)
    truth = COCO(str(coco_file(tmp_path / "truth.json")))
    results = truth.loadRes([{"image_id": i, "caption": c} for i, c in CAPTIONS.items()])
    evaluator = official.COCOEvalCap(truth, results)
    evaluator.params["image_id"] = image_ids or list(CAPTIONS)
    evaluator.evaluate()
    return evaluator.eval


@needs_java
def test_scores_equal_pycocoevalcap(tmp_path, monkeypatch):
    expected = official_scores(tmp_path, monkeypatch)
    tools = Tools(("bleu", "rouge", "cider"), PTB)
    scores = score_captions(CAPTIONS, References(REFERENCES), tools)
    names = {"Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "ROUGE_L", "CIDEr"}
    assert {name: scores[name] for name in names} == pytest.approx(
        {name: float(expected[name]) for name in names}, abs=1e-12
    )
    assert scores["agg_metrics"] == scores["CIDEr"] + scores["Bleu_4"]
    assert scores["tokenizer"] == "ptb"
    assert scores.keys() == names | {"agg_metrics", "tokenizer"}
    # For these simple captions the Python tokenizer gives the same tokens.
    in_python = score_captions(CAPTIONS, References(REFERENCES), IN_PYTHON)
    assert in_python == {**scores, "tokenizer": "python"}
    assert all(type(v) is float for k, v in scores.items() if k != "tokenizer")


@pytest.mark.slow
@needs_java
def test_meteor_equals_pycocoevalcap(tmp_path, monkeypatch):
    tools = Tools(("meteor",), PTB)
    scores = score_captions(CAPTIONS, References(REFERENCES, DOMAINS), tools)
    all_images = official_scores(tmp_path, monkeypatch, ("Spice",))
    one_domain = official_scores(tmp_path, monkeypatch, ("Spice",), image_ids=[3, 4])
    assert scores["METEOR"] == pytest.approx(all_images["METEOR"])
    assert scores["METEOR_near"] == pytest.approx(one_domain["METEOR"])
    assert 0.0 < scores["METEOR"] < 1.0


def test_every_domain_is_scored_like_a_separate_data_set():
    scores = score_captions(CAPTIONS, References(REFERENCES, DOMAINS), IN_PYTHON)
    separate = {}
    for ending, ids in (("", range(1, 7)), ("_in", (1, 2)), ("_near", (3, 4)), ("_out", (5, 6))):
        part = {i: REFERENCES[i] for i in ids}
        domain_scores = score_captions({i: CAPTIONS[i] for i in ids}, References(part), IN_PYTHON)
        separate.update({f"{name}{ending}": value for name, value in domain_scores.items()})
    skipped = {"agg_metrics", "tokenizer"}
    assert {n: v for n, v in scores.items() if n not in skipped} == {
        n: v for n, v in separate.items() if not n.startswith(tuple(skipped))
    }
    assert scores["agg_metrics"] == scores["CIDEr"] + scores["Bleu_4"]
    # Document frequencies over all images would give a different score.
    tokens = [tokens_of({i: x[i] for i in x}, PYTHON) for x in (REFERENCES, _listed(CAPTIONS))]
    _, of_all = Cider().compute_score(*tokens)
    assert abs(np.mean(of_all[:2]) - scores["CIDEr_in"]) > 0.01


def _listed(captions):
    return {image: [caption] for image, caption in captions.items()}


def test_spice_is_averaged_over_each_domain(monkeypatch):
    options = []

    class FakeSpice:
        def compute_score(self, truths, texts):
            options.append(os.environ["JDK_JAVA_OPTIONS"])
            # Like the real one: ordered by sorted image ids, whatever the order of the mapping.
            scores = [{"All": {"f": len(texts[i][0]) / 100}} for i in sorted(truths)]
            return np.mean([s["All"]["f"] for s in scores]), scores

    monkeypatch.setattr(scoring.spice, "Spice", FakeSpice)
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-Xss8m")
    captions = {i: "x" * i for i in range(30, 0, -1)}
    references = References(
        {i: ["x"] for i in captions}, {i: "in" if i <= 4 else "out" for i in captions}
    )
    scores_by_name = score_captions(captions, references, Tools(("spice",), PYTHON))
    assert scores_by_name["SPICE"] == pytest.approx(0.155)
    assert scores_by_name["SPICE_in"] == pytest.approx(0.025)
    assert scores_by_name["SPICE_out"] == pytest.approx(sum(range(5, 31)) / 26 / 100)
    assert "agg_metrics" not in scores_by_name
    assert options[0].startswith("-Xss8m --add-opens=java.base/java.lang=ALL-UNNAMED")
    assert os.environ["JDK_JAVA_OPTIONS"] == "-Xss8m"


def test_failing_java_neither_hangs_nor_affects_the_rest(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", fake_java(tmp_path, "exit 1"))
    scores = score_captions(CAPTIONS, References(REFERENCES), Tools(("meteor", "cider"), PTB))
    assert scores["CIDEr"] > 0 and "METEOR" not in scores
    assert scores["tokenizer"] == "python"
    assert "METEOR failed" in caplog.text and "Treebank tokenizer failed" in caplog.text


# Availability of metrics


def test_without_java_the_rest_is_scored_with_one_warning(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    assert find_tools() == Tools(("bleu", "rouge", "cider"), PYTHON)
    for text in ("meteor", "spice", "tokenizer", "java is not on PATH", "install a Java runtime"):
        assert text in caplog.text
    scores = score_captions(CAPTIONS, References(REFERENCES), find_tools(["cider"]))
    assert scores["CIDEr"] > 0 and scores["tokenizer"] == "python"


def test_requested_but_unavailable_metric_is_an_error(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"run\.metrics .*spice: java is not on PATH; inst"):
        find_tools(["cider", "spice"])
    with pytest.raises(ValueError, match="blue: expected one of bleu, meteor"):
        find_tools(["blue"])
    with pytest.raises(ValueError, match=r"run\.metrics requests"):
        find_tools([])


def test_unusable_java_or_spice_is_explained(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", fake_java(tmp_path, "exit 3"))
    assert find_tools().tokenizer == PYTHON
    assert "java does not run" in caplog.text
    (tmp_path / "spice/lib").mkdir(parents=True)
    monkeypatch.setattr(scoring.spice, "__file__", str(tmp_path / "spice/spice.py"))
    monkeypatch.setattr(scoring, "_java_problem", lambda: None)
    assert find_tools() == Tools(("bleu", "meteor", "rouge", "cider"), PTB)
    assert (
        "computed: spice" in caplog.text
        and "pycocoevalcap.spice.get_stanford_models" in caplog.text
    )
    for name in scoring.SPICE_JARS:
        (tmp_path / "spice/lib" / name).touch()
    caplog.clear()
    assert find_tools().metrics == STANDARD and not caplog.records


# References


def test_references_are_read_from_a_file(tmp_path):
    names = {1: "in-domain", 2: "near-domain", 3: "out-domain", 4: "in-domain"}
    subset = {i: REFERENCES[i] for i in names}
    references = read_references(coco_file(tmp_path / "truth.json", subset, names))
    assert references.captions == subset
    assert references.domains == {1: "in", 2: "near", 3: "out", 4: "in"}
    assert read_references(coco_file(tmp_path / "truth.json", subset)).domains == {}


@pytest.mark.parametrize(
    "content, message",
    [
        (b"[]", "is not in COCO's caption format"),
        (b"{}", "is not in COCO's caption format"),
        (b'{"annotations": [{"image_id": 3}]}', "is not in COCO's caption format"),
        (b"", "is not JSON"),
        (b"a red circle\n", "is not JSON"),
        (b"\xff\xfe{", "is not JSON"),
        (b'{"images": [], "annotations": []}', "has no captions"),
    ],
)
def test_unusable_references_are_rejected(tmp_path, content, message):
    (tmp_path / "truth.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"truth\.json {message}"):
        read_references(tmp_path / "truth.json")


def annotations(path, rows):
    rows = [{"image_id": image, "caption": caption} for image, caption in rows]
    path.write_text(json.dumps({"annotations": rows}))
    return path


def test_captions_of_an_image_may_be_a_list_or_missing(tmp_path, caplog):
    rows = [
        (1, ["a dog", "one dog"]),
        (2, None),
        (3, [" ", "a cat"]),
        (4, 7),
        ("05", "e"),
        (6.0, "f"),
    ]
    references = read_references(annotations(tmp_path / "truth.json", rows))
    assert references.captions == {
        1: ["a dog", "one dog"],
        3: ["a cat"],
        4: ["7"],
        5: ["e"],
        6: ["f"],
    }
    assert "2 captions of" in caplog.text and "null or blank: left out" in caplog.text
    score_captions({1: "a dog", 2: "a"}, references, IN_PYTHON)
    assert "1 of 2 captioned images have no references" in caplog.text


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [("07", "a"), ("7", "b")],
            "annotation 1: '7' and '07', which occurs before, are the same",
        ),
        ([(1, "a"), (2, {"raw": "b"})], "annotation 1: expected a text, got {'raw'"),
        ([(1, True)], "annotation 0: expected a text, got True"),
        ([(None, "a")], "annotation 0: expected a whole number or a text, got None"),
        ([([1], "a")], "annotation 0: expected a whole number or a text"),
    ],
)
def test_rows_of_references_are_refused_by_number(tmp_path, rows, message):
    with pytest.raises(ValueError, match=r"truth\.json cannot be used:") as error:
        read_references(annotations(tmp_path / "truth.json", rows))
    assert message in str(error.value)


CHINESE = ["一只红狗在海滩上跑。", "一只蓝狗在草地上跑", "大狗在路上跑", "小猫在雪地里睡觉"]


@pytest.mark.parametrize(
    "texts",
    [CHINESE, ["犬が走る", "猫が寝る", "赤い車", "青い家"], ["หมาวิ่ง", "แมวนอน", "รถแดง", "บ้าน"]],
)
def test_characters_of_scripts_without_blanks_are_words(texts):
    references = References({i: [text] for i, text in enumerate(texts)})
    equal = score_captions(dict(enumerate(texts)), references, IN_PYTHON)
    near = score_captions(
        {i: text[:-2] + "走" for i, text in enumerate(texts)}, references, IN_PYTHON
    )
    assert equal["Bleu_1"] == pytest.approx(1) and equal["ROUGE_L"] == 1
    assert 0.4 < near["Bleu_1"] < 1 and 0.4 < near["ROUGE_L"] < 1 and near["CIDEr"] > 0


def test_composed_characters_equal_combining_marks():
    assert (
        tokens_of({0: ["un café，vert", "un cafe\u0301 vert"]}, PYTHON)[0] == ["un café vert"] * 2
    )


def test_numeric_ids_become_numbers():
    given, expected = ("000000391895", 7, "0", "d3e9", "²", "-1"), [391895, 7, 0, "d3e9", "²", "-1"]
    assert [as_id(x) for x in given] == expected


def test_images_without_references(caplog):
    with pytest.raises(ValueError) as error:
        score_captions(
            {9: "a dog", 10: "a cat"}, References(REFERENCES, source="gt.json"), IN_PYTHON
        )
    message = str(error.value)
    assert "none of the 2 captioned images is among the 6 of gt.json" in message
    assert "9, 10 here and 1, 2, 3 there" in message

    part = {i: CAPTIONS[i] for i in (1, 2, 3)}
    scores = score_captions({**part, 99: "a cat"}, References(REFERENCES), IN_PYTHON)
    assert "scored on 3 images: 1 of 4 captioned images have no references" in caplog.text
    assert "3 of its 6 images have no caption" in caplog.text
    references = References({i: REFERENCES[i] for i in part})
    assert scores == score_captions(part, references, IN_PYTHON)
    caplog.clear()
    score_captions(part, references, IN_PYTHON)
    assert "scored on" not in caplog.text
