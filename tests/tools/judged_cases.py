"""Files of judged pairs and of labels, written by hand."""

from __future__ import annotations

import csv
import json
import re

import numpy as np

from lavis_mafa.tools.judged_pairs import UNKNOWN, Judged
from lavis_mafa.tools.label_quality import COLUMNS


def judged_file(image, text, truth=None, about=None, **probability):
    size = len(image)
    return Judged(
        image=np.array(image, np.int64),
        text=np.array(text, np.int64),
        from_image=np.ones(size, bool),
        from_text=np.zeros(size, bool),
        probability={name: np.array(p, np.float32) for name, p in probability.items()},
        truth=np.array([UNKNOWN] * size if truth is None else truth, np.int8),
        about=about or {"cfg_path": "a.yaml", "low": 0.5, "high": 0.8},
    )


def save_labels(path, judged, answers, name=None):
    """Write the file that a page saves; ``answers`` are (row of the judged pairs, label)."""
    probability = judged.probability_by(name)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row, answer in answers:
            pair = f"{judged.image[row]}_{judged.text[row]}"
            writer.writerow([pair, "a.jpg", "a, b\nc", float(probability[row]), answer])
    return path


def page_data(path):
    """Return the data inside a page of labels."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
