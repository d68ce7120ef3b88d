"""Simulate how often 95 % intervals contain the true difference, over seeds and test images.

    python -m research coverage

Every simulated study draws new seeds and new images. The difference of image i with seed s is the
true difference plus effects of the seed, of the image (skewed, as hits are) and a residual.
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt

from research.studies.spread import Crossed, Spread

TRUTH = 0.3
# Standard deviations of seeds, images and residual (20 to 30 points for Flickr8k's hits).
SIZES = {
    "images differ most": (0.5, 15.0, 20.0),
    "seeds differ most": (1.5, 5.0, 20.0),
    "neither": (0.0, 0.0, 20.0),
}


def simulated(
    rng: np.random.Generator, seeds: int, images: int, sizes: tuple[float, float, float]
) -> npt.NDArray[np.float64]:
    """Return differences ``(seeds, images)`` whose expected value is `TRUTH`."""
    of_seeds = sizes[0] * rng.standard_normal((seeds, 1))
    of_images = sizes[1] * (rng.exponential(size=(1, images)) - 1.0)
    return TRUTH + of_seeds + of_images + sizes[2] * rng.standard_normal((seeds, images))


def coverage(
    seeds: int, images: int, sizes: tuple[float, float, float], studies: int
) -> tuple[float, float]:
    """Return the shares of studies in which the interval over seeds and images, and the interval
    over seeds alone, contain the true difference."""
    rng, held = np.random.default_rng(0), np.zeros(2)
    for _ in range(studies):
        values = simulated(rng, seeds, images, sizes)
        for place, spread in enumerate((Crossed.over(values), Spread.of(values.mean(axis=1)))):
            interval = None if spread is None else spread.interval
            assert interval is not None
            low, high = interval
            held[place] += low <= TRUTH <= high
    both, alone = held / studies
    return float(both), float(alone)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the number of studies."""
    parser.add_argument("--studies", type=int, default=1000, help="number to simulate (1000)")


def run(args: argparse.Namespace) -> None:
    """Print the coverage of both intervals."""
    print("| effects | seeds | images | seeds and images | seeds alone |\n|---|---|---|---|---|")
    for name, sizes in SIZES.items():
        for seeds, images in ((5, 170), (5, 810), (10, 170), (10, 810)):
            both, alone = coverage(seeds, images, sizes, args.studies)
            print(f"| {name} | {seeds} | {images} | {100 * both:.1f} % | {100 * alone:.1f} % |")
