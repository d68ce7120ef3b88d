"""Metrics of generated captions by pycocoevalcap: BLEU, METEOR, ROUGE-L, CIDEr and SPICE.

METEOR, SPICE and the Penn Treebank tokenizer, which all metrics need, are Java programs.
`find_tools` checks before generation what this machine can run. Without Java the other metrics are
computed on `_python_tokens`, and the result records the tokenizer.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.meteor import meteor
from pycocoevalcap.rouge.rouge import Rouge
from pycocoevalcap.spice import spice
from pycocoevalcap.tokenizer.ptbtokenizer import PUNCTUATIONS, PTBTokenizer

from lavis_mafa.data.annotation_rows import Problem, Refusals
from lavis_mafa.data.known_truth import single_spaced
from lavis_mafa.downstream.row_values import Id, Ids, as_id, id_of, references_of
from lavis_mafa.io.files import read_json
from lavis_mafa.tasks.metrics import METRICS, CaptionMetric, MetricNames

logger = logging.getLogger(__name__)

Tokens = dict[int, list[str]]
STANDARD = ("bleu", "meteor", "rouge", "cider", "spice")
_JAVA_METRICS = ("meteor", "spice")
PTB, PYTHON = "ptb", "python"
SPICE_JARS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")

_INSTALL_JAVA = (
    "install a Java runtime, version 8 or later (such as the package default-jre-headless, or "
    "openjdk of conda), so that `java -version` runs"
)
# SPICE serialises classes that Java closed to reflection in version 16; Java 8 ignores the options.
_OPENED = ("lang", "util", "util.concurrent", "math", "net", "text")
_DOMAINS = {"in-domain": "in", "near-domain": "near", "out-domain": "out", "out-of-domain": "out"}


@dataclass
class References:
    """Captions by annotators.

    Attributes:
        captions: by image id, at least one each.
        domains: ``in``, ``near`` or ``out`` by image id, if the data set (NoCaps) has domains.
        source: origin of the captions, for messages.
    """

    captions: dict[Id, list[str]]
    domains: dict[Id, str] = field(default_factory=dict)
    source: str = "the references"


@dataclass(frozen=True)
class Tools:
    """The installed tools: registered metrics of captions, and the tokenizer."""

    metrics: tuple[str, ...]
    tokenizer: str


def read_references(path: str | os.PathLike[str]) -> References:
    """Read a JSON file in COCO's caption format, with the ``domain`` of images as in NoCaps.

    A list of captions is several captions; null and blank ones are left out, with a warning.

    Raises:
        ValueError: if it has another format, or no captions; listing rows that cannot be used.
    """
    content = read_json(path)
    captions: dict[Id, list[str]] = {}
    refused, ids, left_out = Refusals(), Ids(), 0
    try:
        for number, row in enumerate(content["annotations"]):
            image, given = row["image_id"], row["caption"]
            try:
                wrong, found = ids.add(id_of(image)), references_of(given)
            except ValueError as error:
                wrong, found = str(error), []
            if wrong:
                refused.add("", Problem(f"annotation {number}", wrong))
            elif found:
                captions.setdefault(as_id(image), []).extend(found)
            left_out += not wrong and (len(given) if isinstance(given, list) else 1) - len(found)
        domains = {
            as_id(row["id"]): domain_name(row["domain"])
            for row in content.get("images", ())
            if row.get("domain")
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not in COCO's caption format ({type(error).__name__}: {error}); expected "
            '{"images": [{"id": 1}], "annotations": [{"image_id": 1, "caption": "a dog"}]}'
        ) from error
    refused.end(str(path))
    if left_out:
        logger.warning("%d captions of %s are null or blank: left out", left_out, path)
    if not captions:
        raise ValueError(f"{path} has no captions: its list of annotations is empty")
    return References(captions, domains, str(path))


def domain_name(domain: str) -> str:
    """Return the suffix of a metric for a domain of NoCaps: ``in`` for ``in-domain``, ..."""
    return _DOMAINS.get(domain, domain)


def find_tools(requested: Sequence[str] | None = None) -> Tools:
    """Return the metrics and the tokenizer to score with, and log what is missing.

    Args:
        requested: metrics; None: those of `STANDARD` that this machine can run.

    Raises:
        ValueError: if a requested metric is unknown or cannot run.
    """
    known, missing = tuple(MetricNames("caption")), _missing_tools()
    wanted = STANDARD if requested is None else tuple(requested)
    missing |= {name: f"expected one of {', '.join(known)}" for name in wanted if name not in known}
    lost = [f"{name}: {missing[name]}" for name in wanted if name in missing]
    if requested is not None and (lost or not wanted):
        raise ValueError(
            f"run.metrics requests metrics that this machine cannot run. {'; '.join(lost)}. Or "
            "omit run.metrics to use all available metrics"
        )
    for problem in lost:
        logger.warning("caption metric not computed: %s", problem)
    if PTB in missing:
        logger.warning(
            "a Python tokenizer replaces the Penn Treebank tokenizer (metrics differ slightly from "
            "published ones): %s",
            missing[PTB],
        )
    metrics = tuple(name for name in known if name in wanted and name not in missing)
    return Tools(metrics, PYTHON if PTB in missing else PTB)


def _missing_tools() -> dict[str, str]:
    """Return why ``meteor``, ``spice`` and the tokenizer ``ptb`` cannot run, and how to fix it."""
    java = _java_problem()
    if java:
        return dict.fromkeys((PTB, *_JAVA_METRICS), java)
    folder = Path(spice.__file__).parent / "lib"
    if all((folder / name).is_file() for name in SPICE_JARS):
        return {}
    cure = "run `python -m pycocoevalcap.spice.get_stanford_models` once with a network"
    return {"spice": f"{folder} lacks {' or '.join(SPICE_JARS)}; {cure}"}


def _java_problem() -> str | None:
    if shutil.which("java") is None:
        return f"java is not on PATH; {_INSTALL_JAVA}"
    # Two minutes: a first start on a busy machine with a network disk takes its time.
    if subprocess.run(["java", "-version"], capture_output=True, timeout=120).returncode:
        return f"java does not run; {_INSTALL_JAVA}"
    return None


def score_captions(
    captions: Mapping[Id, str], references: References, tools: Tools
) -> dict[str, Any]:
    """Return metrics of generated captions: ``Bleu_1`` ... ``CIDEr`` (0 to 10), ``SPICE`` (0 to 1).

    ``agg_metrics`` is CIDEr + Bleu_4 as in LAVIS, or the available one of the two. ``tokenizer`` is
    ``ptb`` or ``python``. A metric that fails is logged and skipped.

    If the references have domains, there are also ``CIDEr_in``, ``CIDEr_near``, ``CIDEr_out`` and
    so on. Each domain is evaluated like a separate data set, as on NoCaps' server: for CIDEr, the
    document frequencies of n-grams come from the references of this domain only, and from all
    references for the metric without suffix. CIDEr of a single image is 0 by definition.

    Args:
        captions: by image id, see `as_id`.

    Raises:
        ValueError: if no image has both a caption and references.
    """
    ids = _scored_ids(captions, references)
    tokenizer = tools.tokenizer
    texts = {i: [captions[image]] for i, image in enumerate(ids)}
    truths = {i: references.captions[image] for i, image in enumerate(ids)}
    try:
        tokens, truth_tokens = tokens_of(texts, tokenizer), tokens_of(truths, tokenizer)
    except (OSError, RuntimeError) as error:
        logger.warning("the Penn Treebank tokenizer failed: %s", error)
        tokenizer = PYTHON
        tokens, truth_tokens = tokens_of(texts, tokenizer), tokens_of(truths, tokenizer)
    if tokenizer == PYTHON:
        logger.warning("captions are tokenized in Python: metrics may differ from published ones")
    groups: dict[str, list[int]] = {"": list(range(len(ids)))}
    for i, image in enumerate(ids):
        if image in references.domains:
            groups.setdefault(f"_{references.domains[image]}", []).append(i)
    figures: dict[str, Any] = {}
    for metric in tools.metrics:
        try:
            scored = _score_groups(METRICS[metric], truth_tokens, tokens, groups)
        except Exception as error:  # a metric or its Java program may raise anything
            logger.exception("%s failed and is skipped: %s", metric.upper(), error)
            continue
        figures.update(scored)
        logger.info("%s", "  ".join(f"{name} {value:.4f}" for name, value in scored.items()))
    parts = [figures[name] for name in ("CIDEr", "Bleu_4") if name in figures]
    if parts:
        figures["agg_metrics"] = sum(parts)
    figures["tokenizer"] = tokenizer
    return figures


def _scored_ids(captions: Mapping[Id, str], references: References) -> list[Id]:
    ids = [image for image in captions if image in references.captions]
    total, known = len(captions), len(references.captions)
    if not ids:
        examples = [", ".join(map(repr, list(x)[:3])) for x in (captions, references.captions)]
        raise ValueError(
            f"none of the {total} captioned images is among the {known} of {references.source}: "
            f"image ids are {examples[0]} here and {examples[1]} there"
        )
    if len(ids) < max(total, known):
        logger.warning(
            "scored on %d images: %d of %d captioned images have no references in %s, and %d of "
            "its %d images have no caption; metrics are of this subset",
            len(ids),
            total - len(ids),
            total,
            references.source,
            known - len(ids),
            known,
        )
    return ids


# Tokens


def tokens_of(texts: Mapping[int, Sequence[str]], tokenizer: str) -> Tokens:
    """Return the tokens of every text, joined by spaces, lower case and without punctuation.

    A character of a script without blanks between words, such as Chinese, is a token.

    Raises:
        OSError, RuntimeError: if the Java program fails.
    """
    # A line separator inside a caption would shift all following captions by one.
    clean = {i: [_separated(text) for text in several] for i, several in texts.items()}
    if tokenizer == PYTHON:
        return {i: [_python_tokens(text) for text in several] for i, several in clean.items()}
    found: Tokens = PTBTokenizer().tokenize(
        {i: [{"caption": text} for text in several] for i, several in clean.items()}
    )
    if any(len(found.get(i, ())) != len(several) for i, several in clean.items()):
        raise RuntimeError(
            "the Penn Treebank tokenizer returned another number of lines than it was given"
        )
    return found


_BRACKETS = dict(zip("()[]{}", ("-lrb-", "-rrb-", "-lsb-", "-rsb-", "-lcb-", "-rcb-"), strict=True))
# The tokenizer converts these to its own quotation marks, which are in PUNCTUATIONS.
_REMOVED = {*PUNCTUATIONS, '"', "\N{LEFT DOUBLE QUOTATION MARK}", "\N{RIGHT DOUBLE QUOTATION MARK}"}
_CLITIC = re.compile(r"(n't|'(?:s|re|ve|ll|d|m))\b|(?<=\bcan)(?=not\b)")
# Combining marks and the scripts of India, whose vowel signs are no letters to `re`.
_LETTER = (
    r"[\w\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff]"
)
_TOKEN = re.compile(
    rf"n't\b|'(?:s|re|ve|ll|d|m)\b|(?:[a-z]\.){{2,}}|{_LETTER}+(?:[-'./,:&]{_LETTER}+)*|--|[^\w\s]"
)
# Thai, Lao, Burmese, Khmer, Japanese and Chinese.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
    "\U00020000-\U0003ffff"
)
_UNSPACED_OR_THEIR_MARKS = re.compile(
    f"([{_UNSPACED}])|[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]"
)


def _separated(text: str) -> str:
    """Return a text with single spaces, also around characters of scripts without blanks.

    Composed characters and combining marks of the same look become equal.
    """
    # Marks of the end of a sentence or clause are removed, as those of English are.
    return single_spaced(_UNSPACED_OR_THEIR_MARKS.sub(r" \1 ", unicodedata.normalize("NFC", text)))


def _python_tokens(text: str) -> str:
    """Tokenize a text like the Penn Treebank tokenizer, without Java.

    Lower case; ``n't``, ``'s`` and the like are separate tokens; pycocoevalcap's list of
    punctuation is removed. The tokens are the same for nearly every caption that is a sentence in
    plain English. It differs in abbreviations (``mr.``, ``p.m.`` and ``etc.`` lose their last full
    stop), rarer clitics (``gonna``, ``'tis``, ``rock 'n' roll``), URLs, ``@names``, fractions and
    runs of punctuation (``!!``, ``....``).
    """
    text = _CLITIC.sub(r" \1", text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))
    words = (word for word in _TOKEN.findall(text) if word not in _REMOVED)
    return " ".join(_BRACKETS.get(word, word) for word in words)


# Metrics


def _score_groups(
    metric: CaptionMetric, truths: Tokens, texts: Tokens, groups: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Score all images, under the ending "", and each domain.

    Where a metric gives one value for each image, a domain's is their mean. Any other metric scores
    a domain like a data set of its own: CIDEr's weights, for one, depend on the other images.
    """
    whole, figures = metric(truths, texts), {}
    by_image = all(np.ndim(values) for values in whole.values())
    for ending, members in groups.items():
        found: Mapping[str, Any] = whole
        if ending and by_image:
            found = {name: np.asarray(values)[list(members)] for name, values in whole.items()}
        elif ending:
            found = metric({i: truths[i] for i in members}, {i: texts[i] for i in members})
        figures.update({f"{name}{ending}": float(np.mean(value)) for name, value in found.items()})
    return figures


@METRICS.register("bleu", kind="caption", source="pycocoevalcap")
def _bleu(truths: Tokens, texts: Tokens) -> dict[str, float]:
    """BLEU of captions, of n-grams up to 4 words."""
    scores, _ = Bleu(4).compute_score(truths, texts, verbose=0)
    return {f"Bleu_{n}": score for n, score in enumerate(scores, 1)}


@METRICS.register("meteor", kind="caption", source="pycocoevalcap")
def _meteor(truths: Tokens, texts: Tokens) -> dict[str, float]:
    """METEOR of captions; needs Java."""
    scorer = meteor.Meteor()
    try:
        return {"METEOR": scorer.compute_score(truths, texts)[0]}
    except Exception:
        # It still holds its lock, and its destructor would wait for the lock forever.
        if scorer.lock.locked():
            scorer.lock.release()
        with suppress(OSError):
            scorer.meteor_p.stdin.close()
        raise


@METRICS.register("rouge", kind="caption", source="pycocoevalcap")
def _rouge(truths: Tokens, texts: Tokens) -> dict[str, float]:
    """ROUGE-L of captions."""
    return {"ROUGE_L": Rouge().compute_score(truths, texts)[0]}


@METRICS.register("cider", kind="caption", source="pycocoevalcap")
def _cider(truths: Tokens, texts: Tokens) -> dict[str, float]:
    """CIDEr of captions, 0 to 10."""
    return {"CIDEr": Cider().compute_score(truths, texts)[0]}


@METRICS.register("spice", kind="caption", source="pycocoevalcap")
def _spice(truths: Tokens, texts: Tokens) -> dict[str, list[float]]:
    """SPICE of captions; needs Java."""
    opened = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in _OPENED]
    options = " ".join([os.environ.get("JDK_JAVA_OPTIONS", ""), *opened]).strip()
    with patch.dict(os.environ, {"JDK_JAVA_OPTIONS": options}):
        _, scores = spice.Spice().compute_score(truths, texts)
    return {"SPICE": [score["All"]["f"] for score in scores]}  # in the order of sorted numbers
