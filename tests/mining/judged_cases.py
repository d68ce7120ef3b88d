"""Files of judged pairs and of labels, written by hand."""

from __future__ import annotations

import json
import re

import numpy as np

from lavis_mafa.datasets.judgements import LABELS
from lavis_mafa.mining.judged_pairs import UNKNOWN, Judged

STRATA = [{"low": 0.5, "high": 1.0, "pairs": 10, "drawn": 5}]


def judged_file(image, text, truth=None, about=None, **probability):
    size = len(image)
    return Judged(
        *(np.array(image, np.int64), np.array(text, np.int64)),
        *(np.ones(size, bool), np.zeros(size, bool)),
        {name: np.array(p, np.float32) for name, p in probability.items()},
        np.array([UNKNOWN] * size if truth is None else truth, np.int8),
        about or {"cfg_path": "a.yaml", "low": 0.5, "high": 0.8},
    )


def save_labels(path, digest, answers, above=0.5, strata=STRATA, **changes):
    """Write the file that a page saves; ``answers`` are (image, text, answer)."""
    content = {
        **{"kind": LABELS, "version": 1, "page": "p", "judged": digest, "name": "con_d"},
        "drawn": {"above": above, "count": 5, "seed": 0, "strata": strata},
        "labels": [{"image": int(i), "text": int(t), "answer": a} for i, t, a in answers],
    }
    path.write_text(json.dumps({**content, **changes}))
    return path


def page_data(path):
    """Return the data inside a page of labels or a report."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
