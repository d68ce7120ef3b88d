"""Published tables and figures follow from the recorded figures in their JSON files."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pandas as pd
import pytest
from conftest import ROOT

from research import study as command
from research.__main__ import main
from research.figures import FIGURES, figure_svg
from research.studies.outputs import markdown, markdown_section
from research.studies.results import recorded_results
from research.studies.spread import frame_of, gains_of, spread_of_gain
from research.studies.study_tables import tables_of

RESULTS = ROOT / "docs/results"
PUBLISHED = sorted(path for path in RESULTS.glob("*.json") if path.stem != "compare_toy")
# Whole pages; of the others the study file has been changed since.
WHOLE = ("compare_16", "compare_dense", "compare_fresh", "compare_sparse", "compare_sparse_16")
# Pages of which these tables were published in an earlier form.
OLD = ("compare_clustered", "compare_settings", "ucm")
OTHER_FORM = ("At the end of training",)


def study_of(path):
    """Return the study of a JSON file by its command, and its content."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    words = shlex.split(recorded["command"])
    given = command.parsed(*words[words.index("study") + 1 :])
    given.rows = list(recorded["rows"])
    return command.study_of(given), recorded


def results_of(path):
    study, recorded = study_of(path)
    options = {name: row["options"] for name, row in recorded["rows"].items()}
    # Settings that a study got after it was published do not change its figures.
    rows = [replace(row, options=options[row.name]) for row in study.rows]
    study.file.parameters = recorded["parameters"]
    return recorded_results(replace(study, rows=rows), {path: recorded}, ""), recorded


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_tables_equal_the_recorded_figures(path):
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    tables = tables_of(results_of(path)[0])
    equal = [table.title for table in tables if markdown_section(table) in page]
    assert len(equal) >= (1 if path.stem == "sentences_choice" else 2)
    other = [table.title for table in tables if table.title not in equal]
    assert all(title.startswith(OTHER_FORM) for title in other) and len(other) <= 3
    if path.stem not in OLD:
        assert not other


@pytest.mark.parametrize("name", WHOLE)
def test_published_page_is_written_again_byte_for_byte(name, tmp_path):
    path = RESULTS / f"{name}.json"
    study, recorded = study_of(path)
    again = recorded_results(study, {path: recorded}, "")
    assert markdown(again) == path.with_suffix(".md").read_text(encoding="utf-8")


def sections_of(page):
    return dict(re.findall(r"^## (.+)\n\n((?:(?!## ).*\n)+)", page, re.MULTILINE))


def test_seeds_of_two_files_are_pooled(tmp_path):
    page = (RESULTS / "compare_ten.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("lavis-mafa study "))
    out, words = tmp_path / "ten.md", shlex.split(line)[1:]
    files = {word: str(ROOT / word) for word in words if word.endswith(".json")}
    words = [files.get(word, word) for word in words]
    assert not main([*words, "--results", str(out), "--output", str(tmp_path / "out")])
    ours, theirs = sections_of(out.read_text(encoding="utf-8")), sections_of(page)
    assert ours == theirs and "Seeds 5, 6, 7, 8, 9: compare_fresh.json" in ours["Notes"]


def part(path, seeds, change=lambda content: None):
    """Write recorded results with some of their seeds, as another machine would have."""
    recorded = json.loads((RESULTS / "compare_settings.json").read_text(encoding="utf-8"))
    for row in recorded["rows"].values():
        row["seeds"] = {seed: own for seed, own in row["seeds"].items() if int(seed) in seeds}
    change(recorded)
    path.write_text(json.dumps(recorded), encoding="utf-8")
    return str(path)


ROWS = ["ALBEF-base", "GRIT-VLP", "ECM"]


def pool(tmp_path, *files, more=()):
    out = tmp_path / "pooled.md"
    words = ["study", "compare", "--recorded", *files, "--rows", *ROWS, "--results", str(out)]
    return main([*words, "--output", str(tmp_path / "output"), *more]), out


def other_parameters(recorded):
    recorded["parameters"]["epochs"] = 99


def other_options(recorded):
    recorded["rows"]["ECM"]["options"]["run.max_epoch"] = 99


def without_row(recorded):
    del recorded["rows"]["GRIT-VLP"]


@pytest.mark.parametrize(
    "seeds, change, message",
    [
        ({1, 2}, lambda recorded: None, "another file has seed 1 too"),
        ({2}, other_parameters, "other parameters"),
        ({2}, other_options, "row 'ECM' was run with other options"),
        ({2}, without_row, "has no row 'GRIT-VLP'; leave it out by --rows"),
    ],
)
def test_results_that_do_not_fit_together_are_refused(tmp_path, capsys, seeds, change, message):
    files = part(tmp_path / "a.json", {0, 1}), part(tmp_path / "b.json", seeds, change)
    status, out = pool(tmp_path, *files)
    assert status == 2 and not out.exists()
    assert message in capsys.readouterr().out


def parts_of(svg):
    """Return the texts of a picture in order, and the numbers of what is drawn."""
    nodes = list(ElementTree.fromstring(svg).iter())
    paths = " ".join(node.get("d", "") + node.get("style", "") for node in nodes)
    texts = [node.text.strip() for node in nodes if node.text and node.text.strip()]
    return texts, [float(number) for number in re.findall(r"-?[\d.]+", paths)]


@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_the_docs_equal_the_recorded_runs(name):
    texts, numbers = parts_of((ROOT / "docs/figures" / name).read_text(encoding="utf-8"))
    found = parts_of(figure_svg(name))
    # Versions of matplotlib may place the axes differently by a pixel.
    assert found == (texts, pytest.approx(numbers, abs=1.5))


# Sentences

FIGURES_OF = {
    "ITC of images": ["itc_r1"],
    "people": ["judged_auc_itm"],
    "ITM": ["itm_auc"],
    "class": ["itm_auc_same"],
    "valid": ["itc_valid_r1"],
    "other classes": ["itm_auc_far"],
    "odds": ["odds_any_r1"],
    "mAP": ["odds_txt_map_r", "odds_img_map_r"],
    "R@1": ["any_r1"],
    "map_r": ["map_r"],
}
# What a page says; records; row; than; the figures whose mean is compared.
SENTENCES = """
README.md | by 0.027 (AUC) | photographs_set | ALBEF-base | GRIT-VLP | people
README.md | regains 0.029 | photographs_set | ECM | GRIT-VLP | people
README.md | R@1 (+0.9 points) | photographs_set | quantile + ECM | ALBEF-base | ITC of images
README.md | ITM (AUC +0.011) | photographs_set | quantile + ECM | ALBEF-base | people
README.md | R@1 of ITC +0.9 points (+0.5 to +1.4) | photographs_set | quantile + ECM | ALBEF-base | ITC of images
README.md | ITM's AUC +0.011 (+0.003 to +0.019) | photographs_set | quantile + ECM | ALBEF-base | people
README.md | +0.0 points, -0.2 to +0.3 | photographs_set | quantile + ECM | quantile | ITC of images
README.md | +0.070 (+0.048 to +0.092) | ucm_set | random + ECM | ALBEF-base | class
README.md | +12.7 points of R@1 (+9.1 to +16.3) | rerank | GRIT-VLP | ALBEF-base | odds
results.md | retrieval +0.9 (+0.3 to +1.6) | photographs_set | GRIT-VLP | ALBEF-base | ITC of images
results.md | ITM -0.027 (-0.041 to -0.013) | photographs_set | GRIT-VLP | ALBEF-base | people
results.md | ITM +0.029 (+0.019 to +0.039) | photographs_set | ECM | GRIT-VLP | people
results.md | ITM +0.082 (+0.056 to +0.109) | ucm_set | ECM | GRIT-VLP | class
results.md | ITM +0.070 (+0.048 to +0.092) | ucm_set | random + ECM | ALBEF-base | class
results.md | retrieval +12.7 (+9.1 to +16.3) | rerank | GRIT-VLP | ALBEF-base | odds
results.md | ITM +0.013 (+0.006 to +0.021) | compare_ten | ECM | GRIT-VLP | ITM
results.md | ITM +0.011 (+0.009 to +0.013) | compare_ten_more | ALBEF-base + ECM | ALBEF-base | ITM
results.md | ITM +0.024 (+0.018 to +0.030) | compare_sparse | ALBEF-base + ECM | ALBEF-base | ITM
results.md | ITM +0.020 (+0.013 to +0.028) | compare_dense | ECM | GRIT-VLP | ITM
results.md | ITM +0.045 (+0.018 to +0.071) | compare_dense | ALBEF-base + ECM | ALBEF-base | ITM
results.md | by 10.5 points (2.8 to 18.2 | compare_dense | ALBEF-base | GRIT-VLP | R@1
results.md | 9.6 points (5.9 to 13.2) | compare_sparse | ALBEF-base | GRIT-VLP | R@1
results.md | 1.1 points is not significant (-0.2 to +2.4) | rerank | ECM | GRIT-VLP | odds
results.md | by -0.009 (-0.023 to +0.005) | photographs photographs_fixed | ECM | ALBEF-base | people
results.md | by 0.245 (0.197 to 0.293; | photographs_fixed | ECM | ECM, regions | people
results.md | costs 1.3 points (0.4 to 2.2) | ucm_features | ALBEF-base | GRIT-VLP | mAP
results.md | against other classes -0.004 | ucm_set | random + ECM | ALBEF-base | other classes
results.md | by 0.070 (0.048 to 0.092; | ucm_set | random + ECM | ALBEF-base | class
results.md | costs 1.6 points (0.3 to 2.9) | ucm_set | ALBEF-base | ECM | valid
results.md | MAFA 13.0 (10.2 to 15.8) | ucm_set | ALBEF-base | MAFA | valid
results.md | gains 12.7 points (9.1 to 16.3) | rerank | GRIT-VLP | ALBEF-base | odds
results.md | significant difference (-0.6 | rerank_dense | GRIT-VLP | ALBEF-base | odds
results.md | and +0.5) | rerank_sparse | GRIT-VLP | ALBEF-base | odds
results.md | (+5.0, 3.5 to 6.6) | compare_ten_more | GRIT-VLP, fine-tuned for retrieval | ALBEF-base, fine-tuned for retrieval | R@1
results.md | (+0.3, -0.8 to +1.4) | compare_ten_more | ECM, fine-tuned for retrieval | GRIT-VLP, fine-tuned for retrieval | R@1
results.md | by +0.002 (-0.002 to +0.007) | photographs photographs_fixed | random + ECM | ALBEF-base | people
with_sentence_transformers.md | gained 1.95 points of mAP@R (+0.72 to +3.17) | sentences | library's loss, no duplicates | library's loss | map_r
"""  # noqa: E501
# What a page says; the figure, and for each number the record and row of its mean over seeds.
MEANS = """
README.md | 1 % of the hard negatives are false | false_negative_rate | compare_ten: ALBEF-base
README.md | and 30 % of them false | false_negative_rate | compare_ten: GRIT-VLP
README.md | 17 % false negatives instead of 30 % | false_negative_rate_in_itm | compare_ten: ECM | compare_ten: GRIT-VLP
analysis.md | helped at 0.9 % | false_negative_rate | compare_ten: ALBEF-base
analysis.md | at 10 to 31 % | false_negative_rate | compare_16: GRIT-VLP, M = train / 8 | compare_16: GRIT-VLP, from the warm-up
analysis.md | results at 4.6 and 13 % | false_negative_rate | compare_sparse_16: ALBEF-base | compare_sparse: ALBEF-base
analysis.md | no gain at 28 %, or from 38 % | false_negative_rate | compare_dense: ALBEF-base | ucm_search_space: GRIT-VLP, an eighth of M
false_negatives.md | from 38.5 to 32.7, dropping to 35.2 | txt_r1 | methods_clustered: GRIT-VLP | methods_clustered: ECM | methods_clustered: ECM, dropped
results.md | 37.4 to 30.9 | txt_r1 | compare_ten: GRIT-VLP | compare_ten: ECM
results.md | costs GRIT-VLP 12.9 and 8.3 | odds_gain | rerank_dense: GRIT-VLP | rerank_sparse: GRIT-VLP
results.md | 38.2 / 70.3 % | false_negative_rate | ucm_set: ALBEF-base | ucm_set: GRIT-VLP
results.md | 0.9 / 30.4 % | false_negative_rate | compare_ten: ALBEF-base | compare_ten: GRIT-VLP
results.md | 12.6 / 53.2 % | false_negative_rate | compare_sparse: ALBEF-base | compare_sparse: GRIT-VLP
results.md | 27.7 / 62.9 % | false_negative_rate | compare_dense: ALBEF-base | compare_dense: GRIT-VLP
results.md | makes 30 % of the hard negatives | false_negative_rate | compare_ten: GRIT-VLP
results.md | 64 % of the hard negatives | con_d_precision | compare_ten: ECM
results.md | 34 % of all hard negatives | con_d_base_rate | compare_ten: ECM
results.md | Con-D finds 54 % | con_d_recall | compare_ten: ECM
results.md | falls from 0.790 | judged_auc_itm | photographs_early: shared warm-up
results.md | AUC 0.289 | judged_auc_itm | photographs_early: GRIT-VLP
results.md | ALBEF-base 0.765 | judged_auc_itm | photographs_early: ALBEF-base
results.md | ECM 0.450 | judged_auc_itm | photographs_early: ECM
"""  # noqa: E501
# Figures of the papers and of the toy world, and what is not a figure.
NOT_MEASURED = (
    "](https://github.com/salesforce/LAVIS) 1.0.2",
    "estimates that 2.5 % of the hard negatives are false",
    "| 0.03 % (of one topic: 9.8 %) | 1.7 % | 0.4 % |",
    "run.grit.hardness: 0.95",
    "p is at most 0.05",
)


def words_of(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    return " ".join((folder / page).read_text(encoding="utf-8").replace("**", "").split())


@cache
def by_image_of(name):
    return results_of(RESULTS / f"{name}.json")[0].by_image


def seeds_of(name):
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return {row: own["seeds"] for row, own in rows.items()}


@pytest.mark.parametrize("sentence", MEANS.strip().splitlines())
def test_means_of_sentences_are_those_of_their_records(sentence):
    page, says, figure, *rows = sentence.split(" | ")
    assert says in words_of(page)
    numbers = re.findall(r"(?<![@\w])\d+(?:\.\d+)?", says)
    for number, place in zip(numbers, rows, strict=True):
        record, row = place.split(": ")
        value = frame_of(seeds_of(record)).loc[row][figure].mean()
        digits = len(number.partition(".")[2])
        assert float(number) == float(f"{value:.{digits}f}")


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_no_figure_is_without_a_record(page):
    text = (ROOT / page).read_text(encoding="utf-8").partition("## Install")[0]
    # Other tests compare the tables after a comment with the pages that they name.
    text = re.sub(r"<!-- \w+: .* -->\n(\|.*\n)+", "", text)
    text = " ".join(re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("**", "").split())
    sentences = [*SENTENCES.strip().splitlines(), *MEANS.strip().splitlines()]
    known = [line.split(" | ")[1] for line in sentences]
    for phrase in sorted((*known, *NOT_MEASURED), key=len, reverse=True):
        text = text.replace(phrase, "")
    assert re.findall(r".{40}\b\d+\.\d+.{20}", text) == []


@pytest.mark.parametrize("sentence", SENTENCES.strip().splitlines())
def test_figures_in_sentences_equal_their_records(sentence):
    page, says, records, row, than, figure = sentence.split(" | ")
    assert says in words_of(page)
    figures = pd.concat([frame_of(seeds_of(one)) for one in records.split()])
    figures["mean"] = figures[FIGURES_OF[figure]].mean(axis=1)
    gains = gains_of(figures, row, than, "mean")
    by_image = [by_image_of(records.split()[0]).get(one, {}) for one in (row, than)]
    spread = spread_of_gain(gains, *by_image, FIGURES_OF[figure][0])
    numbers = re.findall(r"(?<!@)[-+]?\b\d+\.\d+", says)
    found = [spread.mean, *spread.interval] if len(numbers) != 2 else spread.interval
    for number, value in zip(numbers, found, strict=len(numbers) > 1):
        assert float(number) == float(f"{value:.{len(number.split('.')[1])}f}")
