"""The forms of ITC as loops of their equations, for one anchor.

``sim``, ``degree`` and ``label`` are lists over the candidates that are not dropped.
"""

from __future__ import annotations

import math


def slow_softmax(sim, degree, label, temperature):
    total = sum(math.exp(s) for s in sim)
    return -sum(y * math.log(math.exp(s) / total) for s, y in zip(sim, label, strict=True))


def slow_sigmoid(sim, degree, label, temperature, relative_bias=1.0):
    bias = -relative_bias / temperature
    return sum(
        -d * math.log(1 / (1 + math.exp(-s - bias)))
        - (1 - d) * math.log(1 / (1 + math.exp(s + bias)))
        for s, d in zip(sim, degree, strict=True)
    )


def slow_debiased(sim, degree, label, temperature, prior=0.1):
    count = sum(1 - d for d in degree)
    pairs = list(zip(sim, degree, strict=True))
    mean_negative = sum((1 - d) * math.exp(s) for s, d in pairs) / count
    mean_positive = sum(d * math.exp(s) for s, d in pairs) / sum(degree)
    g = max((mean_negative - prior * mean_positive) / (1 - prior), math.exp(-1 / temperature))
    return -sum(
        y * math.log(math.exp(s) / (math.exp(s) + count * g))
        for s, y in zip(sim, label, strict=True)
    )


def slow_rince(sim, degree, label, temperature, exponent=0.5, weight=0.01):
    # Large exponents are divided by e^(q * shift), the same for all pairs.
    q, shift = exponent, max(1 / temperature - 10.0 / exponent, 0.0)
    negatives = sum((1 - d) * math.exp(s) for s, d in zip(sim, degree, strict=True))
    return sum(
        y
        * ((weight * (math.exp(s) + negatives) * math.exp(-shift)) ** q - math.exp(q * (s - shift)))
        / q
        for s, y in zip(sim, label, strict=True)
    )


SLOW_FORMS = {
    "softmax": slow_softmax,
    "sigmoid": slow_sigmoid,
    "debiased": slow_debiased,
    "rince": slow_rince,
}
