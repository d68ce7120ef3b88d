"""Scores of captions against pycocoevalcap's own pipeline, with and without Java."""

from __future__ import annotations

import json
import logging
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

from lavis_mafa.config.schema import CAPTION_METRICS
from lavis_mafa.metrics import captions as scoring
from lavis_mafa.metrics.captions import (
    METRICS,
    PTB,
    PYTHON,
    References,
    Tools,
    as_id,
    find_tools,
    python_tokens,
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
    """References in COCO's format; ``domains``: what NoCaps adds to the images."""
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
    """A ``java`` of our own, the only one on the PATH it returns."""
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
        ("", ""),
    ],
)
def test_python_tokens(text, tokens):
    assert python_tokens(text) == tokens


@needs_java
def test_python_tokens_are_those_of_the_penn_treebank():
    texts = [t for several in REFERENCES.values() for t in several]
    texts += [
        "A man's dog isn't big.",
        'a "stop" sign',
        "T-shirts (3 of them)",
        "1,000 cats & dogs",
    ]
    numbered = {i: [text] for i, text in enumerate(texts)}
    assert tokens_of(numbered, PYTHON) == tokens_of(numbered, PTB)


@needs_java
def test_a_line_separator_in_a_caption_shifts_no_other():
    texts = {1: ["a\u2028b", "c\rd"], 2: ["e\nf\x85g"], 3: ["h"]}
    assert tokens_of(texts, PTB) == {1: ["a b", "c d"], 2: ["e f g"], 3: ["h"]}
    assert tokens_of(texts, PYTHON) == tokens_of(texts, PTB)


@given(st.text())
def test_python_tokens_are_lower_case_words_without_listed_punctuation(text):
    tokens = python_tokens(text).split(" ")
    assert not set(tokens) & (scoring._REMOVED | {"(", ")"})
    assert all(token == token.lower() for token in tokens)
    assert python_tokens(text) == python_tokens(f"  {text}\n")


# Figures


class NoMetric:
    """In the place of a metric that the official pipeline shall leave out."""

    def compute_score(self, truths, texts):
        return 0.0, [0.0] * len(truths)

    def method(self):
        return "none"


def official_figures(tmp_path, monkeypatch, without=("Meteor", "Spice"), which=None):
    for name in without:
        monkeypatch.setattr(official, name, NoMetric)
    truth = COCO(str(coco_file(tmp_path / "truth.json")))
    found = truth.loadRes([{"image_id": i, "caption": c} for i, c in CAPTIONS.items()])
    evaluator = official.COCOEvalCap(truth, found)
    evaluator.params["image_id"] = which or list(CAPTIONS)
    evaluator.evaluate()
    return evaluator.eval


@needs_java
def test_figures_are_those_of_pycocoevalcap(tmp_path, monkeypatch):
    expected = official_figures(tmp_path, monkeypatch)
    tools = Tools(("bleu", "rouge", "cider"), PTB)
    figures = score_captions(CAPTIONS, References(REFERENCES), tools)
    names = {"Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "ROUGE_L", "CIDEr"}
    assert {name: figures[name] for name in names} == pytest.approx(
        {name: float(expected[name]) for name in names}, abs=1e-12
    )
    assert figures["agg_metrics"] == figures["CIDEr"] + figures["Bleu_4"]
    assert figures["tokenizer"] == "ptb"
    assert figures.keys() == names | {"agg_metrics", "tokenizer"}
    # These captions are plain enough for the stand-in.
    in_python = score_captions(CAPTIONS, References(REFERENCES), IN_PYTHON)
    assert in_python == {**figures, "tokenizer": "python"}
    assert all(type(v) is float for k, v in figures.items() if k != "tokenizer")


@pytest.mark.slow
@needs_java
def test_meteor_is_that_of_pycocoevalcap(tmp_path, monkeypatch):
    tools = Tools(("meteor",), PTB)
    figures = score_captions(CAPTIONS, References(REFERENCES, DOMAINS), tools)
    whole = official_figures(tmp_path, monkeypatch, ("Spice",))
    part = official_figures(tmp_path, monkeypatch, ("Spice",), which=[3, 4])
    assert figures["METEOR"] == pytest.approx(whole["METEOR"])
    assert figures["METEOR_near"] == pytest.approx(part["METEOR"])
    assert 0.0 < figures["METEOR"] < 1.0


def test_a_domain_is_a_data_set_of_its_own():
    figures = score_captions(CAPTIONS, References(REFERENCES, DOMAINS), IN_PYTHON)
    alone = {}
    for ending, ids in (("", range(1, 7)), ("_in", (1, 2)), ("_near", (3, 4)), ("_out", (5, 6))):
        part = {i: REFERENCES[i] for i in ids}
        found = score_captions({i: CAPTIONS[i] for i in ids}, References(part), IN_PYTHON)
        alone.update({f"{name}{ending}": value for name, value in found.items()})
    skipped = {"agg_metrics", "tokenizer"}
    assert {n: v for n, v in figures.items() if n not in skipped} == {
        n: v for n, v in alone.items() if not n.startswith(tuple(skipped))
    }
    assert figures["agg_metrics"] == figures["CIDEr"] + figures["Bleu_4"]
    # Document frequencies of all images would give something else.
    tokens = [tokens_of({i: x[i] for i in x}, PYTHON) for x in (REFERENCES, _listed(CAPTIONS))]
    _, of_all = Cider().compute_score(*tokens)
    assert abs(np.mean(of_all[:2]) - figures["CIDEr_in"]) > 0.01


def _listed(captions):
    return {image: [caption] for image, caption in captions.items()}


def test_identical_captions_score_highest():
    truth = References({i: [text] for i, text in CAPTIONS.items()})
    figures = score_captions(CAPTIONS, truth, IN_PYTHON)
    assert figures["Bleu_4"] == pytest.approx(1.0, abs=1e-6)
    assert figures["ROUGE_L"] == 1.0
    assert figures["CIDEr"] == pytest.approx(10.0)


def test_spice_is_averaged_over_each_domain(monkeypatch):
    options = []

    class FakeSpice:
        def compute_score(self, truths, texts):
            options.append(os.environ["JDK_JAVA_OPTIONS"])
            # As the real one: in the order of sorted image ids, whatever that of the mapping is.
            scores = [{"All": {"f": len(texts[i][0]) / 100}} for i in sorted(truths)]
            return np.mean([s["All"]["f"] for s in scores]), scores

    monkeypatch.setattr(scoring.spice, "Spice", FakeSpice)
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-Xss8m")
    captions = {i: "x" * i for i in range(30, 0, -1)}
    references = References(
        {i: ["x"] for i in captions}, {i: "in" if i <= 4 else "out" for i in captions}
    )
    figures = score_captions(captions, references, Tools(("spice",), PYTHON))
    assert figures["SPICE"] == pytest.approx(0.155)
    assert figures["SPICE_in"] == pytest.approx(0.025)
    assert figures["SPICE_out"] == pytest.approx(sum(range(5, 31)) / 26 / 100)
    assert "agg_metrics" not in figures
    assert options[0].startswith("-Xss8m --add-opens=java.base/java.lang=ALL-UNNAMED")
    assert os.environ["JDK_JAVA_OPTIONS"] == "-Xss8m"


def test_a_metric_that_fails_loses_no_other(monkeypatch, caplog):
    class NoMemory:
        def compute_score(self, truths, texts):
            raise MemoryError("Java heap space")

    monkeypatch.setattr(scoring.spice, "Spice", NoMemory)
    monkeypatch.delenv("JDK_JAVA_OPTIONS", raising=False)
    tools = Tools(("bleu", "spice", "cider"), PYTHON)
    figures = score_captions(CAPTIONS, References(REFERENCES), tools)
    assert "SPICE" not in figures and figures["CIDEr"] > 0 and figures["Bleu_1"] > 0
    assert "SPICE failed and is skipped: Java heap space" in caplog.text
    assert "JDK_JAVA_OPTIONS" not in os.environ


def test_a_dying_java_neither_hangs_nor_loses_the_rest(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", fake_java(tmp_path, "exit 1"))
    figures = score_captions(CAPTIONS, References(REFERENCES), Tools(("meteor", "cider"), PTB))
    assert figures["CIDEr"] > 0 and "METEOR" not in figures
    assert figures["tokenizer"] == "python"
    assert "METEOR failed" in caplog.text and "a Python tokenizer replaces it" in caplog.text


# What this machine can score


def test_metrics_have_the_names_of_the_config():
    assert METRICS == CAPTION_METRICS


def test_without_java_the_rest_is_scored_and_one_warning_says_what_is_missing(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    assert find_tools() == Tools(("bleu", "rouge", "cider"), PYTHON)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    for told in ("METEOR", "SPICE", "tokenizer", "java is not on PATH", "install a Java runtime"):
        assert told in warning
    figures = score_captions(CAPTIONS, References(REFERENCES), find_tools(["cider"]))
    assert figures["CIDEr"] > 0 and figures["tokenizer"] == "python"


def test_a_metric_asked_for_that_cannot_be_had_is_an_error(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"run\.metrics .*spice: java is not on PATH; inst"):
        find_tools(["cider", "spice"])
    with pytest.raises(ValueError, match="got blue; expected some of bleu, meteor"):
        find_tools(["blue"])
    with pytest.raises(ValueError, match="got an empty list"):
        find_tools([])


def test_a_java_that_does_not_run_is_told_from_none(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", fake_java(tmp_path, "exit 3"))
    assert find_tools().tokenizer == PYTHON
    assert "java does not run" in caplog.text and "exit status 3" in caplog.text


def test_spice_without_its_files_is_missing_from_the_start(tmp_path, monkeypatch, caplog):
    (tmp_path / "spice/lib").mkdir(parents=True)
    monkeypatch.setattr(scoring.spice, "__file__", str(tmp_path / "spice/spice.py"))
    monkeypatch.setattr(scoring, "_java_problem", lambda: None)
    monkeypatch.setattr(scoring, "tokens_of", lambda texts, tokenizer: {0: ["a dog"]})
    assert find_tools() == Tools(("bleu", "meteor", "rouge", "cider"), PTB)
    assert "SPICE" in caplog.text and "pycocoevalcap.spice.get_stanford_models" in caplog.text
    for name in scoring.SPICE_JARS:
        (tmp_path / "spice/lib" / name).touch()
    caplog.clear()
    assert find_tools().metrics == METRICS
    assert not caplog.records


# References


def test_references_of_a_file(tmp_path):
    names = {1: "in-domain", 2: "near-domain", 3: "out-domain", 4: "in-domain"}
    some = {i: REFERENCES[i] for i in names}
    found = read_references(coco_file(tmp_path / "truth.json", some, names))
    assert found.captions == some
    assert found.domains == {1: "in", 2: "near", 3: "out", 4: "in"}
    assert read_references(coco_file(tmp_path / "truth.json", some)).domains == {}


@pytest.mark.parametrize("content", [[], {}, {"annotations": [{"image_id": 3}]}])
def test_references_of_another_format(tmp_path, content):
    path = tmp_path / "truth.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"truth\.json is not in COCO's caption format"):
        read_references(path)


@pytest.mark.parametrize("content", [b"", b"a red circle\n", b"\xff\xfe{"])
def test_references_that_are_not_json(tmp_path, content):
    path = tmp_path / "truth.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"truth\.json is not JSON"):
        read_references(path)


def test_no_references_at_all(tmp_path):
    path = tmp_path / "truth.json"
    path.write_text('{"images": [], "annotations": []}')
    with pytest.raises(ValueError, match=r"truth\.json has no captions"):
        read_references(path)


def test_ids_are_numbers_where_they_are_numbers():
    assert [as_id(x) for x in ("000000391895", 7, "0", "d3e9", "²", "-1")] == [
        391895,
        7,
        0,
        "d3e9",
        "²",
        "-1",
    ]


def test_other_images_than_the_references(caplog):
    with pytest.raises(ValueError) as error:
        score_captions(
            {9: "a dog", 10: "a cat"}, References(REFERENCES, source="gt.json"), IN_PYTHON
        )
    told = str(error.value)
    assert "none of the 2 captioned images is among the 6 of gt.json" in told
    assert "9, 10 here and 1, 2, 3 there" in told and "run.annotation_file" in told

    part = {i: CAPTIONS[i] for i in (1, 2, 3)}
    figures = score_captions({**part, 99: "a cat"}, References(REFERENCES), IN_PYTHON)
    assert "scored on 3 images: 1 of 4 captioned images have no references" in caplog.text
    assert "3 of its 6 images have no caption" in caplog.text
    whole = References({i: REFERENCES[i] for i in part})
    assert figures == score_captions(part, whole, IN_PYTHON)
    caplog.clear()
    score_captions(part, whole, IN_PYTHON)
    assert "scored on" not in caplog.text
