"""Learn the hardness of every anchor (FALCON; Kim, Shim, Lee; arXiv 2505.11192).

Use it like a schedule of your own: ``run.plugins: [research/falcon.py]`` and
``run.grit.schedule: learned``; its settings are ``run.grit.learned``.

While a mini-batch is formed, a small network reads how the anchor's similarities to the pairs of
its search space are distributed and gives a Beta distribution over the quantile q, from which q is
drawn; the q-quantile of the remaining pairs comes next. The network learns by policy gradient:
choices that formed a mini-batch become more probable if training on it lowered its language loss by
more than usual.

The paper does not specify these details, which we chose. Choices are rewarded an epoch after they
were drawn, when their mini-batch is trained, with the clipped ratio of PPO (``clip``). Rewards are
normalised by their running mean and deviation (``decay``), at most 5 in absolute value. The
language loss is that of the mini-batch's own pairs, without dropout, with the same words hidden
before and after the step. Alpha and beta are 1 + softplus, so that the density has one peak.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from lavis_mafa.algorithm.backbone import Backbone, evaluating
from lavis_mafa.algorithm.grit.grouping import Floats, Indices
from lavis_mafa.algorithm.grit.hardness import HARDNESS, AfterStep, HardnessSchedule, StepAhead
from lavis_mafa.algorithm.grit.sampler import EpochPlan
from lavis_mafa.algorithm.options import Checked, option
from lavis_mafa.algorithm.tokens import captions_of

_FALL = "fall_of_lm"  # the reward's name in logs
_ROWS_AT_A_TIME = 256  # number of anchors whose similarities are sorted together
_EDGE = 1e-6  # q stays this far from 0 and 1, where the density's logarithm may be infinite
FIRST_REWARDS = 10  # number of rewards that set the baseline before the network learns
_LARGEST_ADVANTAGE = 5.0  # limit of a reward, in standard deviations
# One choice for each sample of an epoch; q is NaN for samples that were not chosen.
Choices = NDArray[np.void]


@dataclass(frozen=True)
class LearnedSettings(Checked):
    """Settings of `LearnedHardness`."""

    quantiles: int = option(
        16, "m: quantiles of an anchor's similarities that the network reads", low=2, high=256
    )
    width: int = option(64, "width of the network's hidden layers", low=1)
    lr: float = option(0.001, "learning rate of the network (Adam)", low=0, above=True)
    decay: float = option(
        0.99, "decay of the running mean and variance of rewards", low=0, high=0.9999
    )
    clip: float = option(
        0.2,
        "how far, as a share, the density of a choice may move from that at its draw before it is "
        "no longer learned from",
        source="PPO",
        low=0,
        above=True,
    )
    every: int = option(
        1,
        "optimizer steps between rewards; each costs two forward passes of the language loss",
        low=1,
    )


class _QuantileNetwork(nn.Module):
    """Network from an anchor's similarities to a Beta distribution over q: four layers, two of them
    residual.

    Args:
        quantiles: m, number of quantiles that are read.
        width: width of the hidden layers.
    """

    def __init__(self, quantiles: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(quantiles, width)
        self.hidden = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.last = nn.Linear(width, 2)

    def forward(self, quantiles: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and beta ``(A,)``, both above 1, for A anchors.

        Args:
            quantiles: ``(A, m)`` quantiles of the anchors' similarities, in ascending order.
        """
        # Row-wise softmax as in the paper, times m, so that inputs are about 1 for any m.
        seen = quantiles.softmax(dim=1) * quantiles.shape[1]
        hidden = F.gelu(self.first(seen))
        for layer in self.hidden:
            hidden = hidden + F.gelu(layer(hidden))
        # Above 1 the density is bounded and has one peak.
        alpha, beta = (1.0 + F.softplus(self.last(hidden))).unbind(dim=1)
        return alpha, beta


def _similarity_quantiles(sims: Floats, count: int) -> NDArray[np.float16]:
    """Return evenly spaced quantiles of every anchor's similarities to all others.

    Args:
        sims: ``(M, M)``; the diagonal (own pairs) is left out.
        count: m.

    Returns:
        ``(M, m)`` ascending: the values of rank ``round(i / (m - 1) * (M - 2))``, i from 0 to
        m - 1; zeros if M is 1.
    """
    size = len(sims)
    found = np.zeros((size, count), np.float16)
    if size == 1:
        return found
    # The own pair becomes the smallest, at position 0.
    places = 1 + np.rint(np.linspace(0, size - 2, count)).astype(np.int64)
    for begin in range(0, size, _ROWS_AT_A_TIME):
        rows = sims[begin : begin + _ROWS_AT_A_TIME].copy()
        rows[np.arange(len(rows)), np.arange(begin, begin + len(rows))] = -np.inf
        rows.sort(axis=1)
        found[begin : begin + len(rows)] = rows[:, places]
    return found


class Draw:
    """Draw q for every anchor of a sub-queue, as ``hardness`` of `lavis_mafa.algorithm.grit.group`.

    Args:
        network: a copy of the network that nothing else changes.
        kind: type of `choices`.
        quantiles: m, number of quantiles that are read.
        seed: seed of the draw.
    """

    def __init__(self, network: nn.Module, kind: np.dtype[Any], quantiles: int, seed: int) -> None:
        self.network, self.kind, self.quantiles, self.seed = network, kind, quantiles, seed
        self.choices: Choices = np.empty(0, kind)

    @torch.no_grad()
    def __call__(self, i2t: Floats, t2i: Floats) -> Floats:
        """Return q ``(M,)``, and store it with the network's input.

        Args:
            i2t, t2i: ``(M, M)`` similarities, each the sum of both directions.
        """
        seen = _similarity_quantiles(i2t, self.quantiles)
        alpha, beta = self.network(torch.from_numpy(seen).float())
        rng = np.random.default_rng(self.seed)
        drawn = rng.beta(alpha.double().numpy(), beta.double().numpy())
        self.choices = np.empty(len(seen), self.kind)
        self.choices["q"] = np.clip(drawn, _EDGE, 1.0 - _EDGE)
        self.choices["seen"] = seen
        self.choices["density"] = _log_densities(self.network, self.choices).numpy()
        found: Floats = self.choices["q"].copy()
        return found

    def along(self, chain: Indices) -> NDArray[np.uint8]:
        """Return, as bytes, the choice that led to each pair of a chain ``(M,)``, except the
        first."""
        found = self.choices[np.roll(chain, 1)]
        found["q"][0] = np.nan
        return as_bytes(found)


@HARDNESS.register("learned", settings=LearnedSettings, source="FALCON")
class LearnedHardness(HardnessSchedule):
    """Draw the hardness for every anchor from a network that learns by policy gradient.

    Args:
        hardness: not used, since q is drawn.
        own: see `LearnedSettings`.

    Attributes:
        network, optimizer: the same on all ranks.
        table: ``(N,)`` choice that put each sample of the epoch into its mini-batch; None before
            the first grouped epoch.
    """

    learns = True

    def __init__(self, hardness: float, own: LearnedSettings) -> None:
        self.settings = own
        # q, and log pi(q) and the network's input at the draw.
        self.kind = np.dtype(
            [
                ("q", np.float32),
                ("density", np.float32),
                ("seen", np.float16, (own.quantiles,)),
            ]
        )
        self.choice_bytes = self.kind.itemsize
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same on all ranks, without changing other random draws
            self.network = self.build_network()
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=own.lr)
        self.table: Choices | None = None
        # Weighted sums of the rewards, their squares, and 1.
        self._rewards = [0.0, 0.0, 0.0]
        self._updates = 0

    def build_network(self) -> nn.Module:
        """Return a new network that maps quantiles ``(A, m)`` to alpha and beta ``(A,)``."""
        return _QuantileNetwork(self.settings.quantiles, self.settings.width)

    @classmethod
    def problems_of(cls, cfg: Any) -> Iterator[tuple[str, str, bool]]:
        """Yield contradictions in a config; see `lavis_mafa.io.problems`."""
        key = "run.grit.schedule"
        if cfg["model.mafa.loss_weights.lm"] == 0:
            why = (
                "learned needs the language loss, whose fall is the reward, but "
                "model.mafa.loss_weights.lm is 0; set it above 0, or use another schedule"
            )
            yield key, why, False

    def at(self, grouped_epochs: int) -> LearnedHardness:
        """Return the object that draws q, which is this object in every epoch."""
        return self

    def describe(self, first: int, last: int) -> str:
        """Describe in words how q is drawn."""
        every, own = self.settings.every, self.settings
        when = "every optimizer step" if every == 1 else f"every {every} optimizer steps"
        return (
            f"hardness learned from {own.quantiles} quantiles, two more forward passes of the "
            f"language loss at {when} of grouped epochs"
        )

    def draws(self, seeds: list[int]) -> list[Draw]:
        """Return a `Draw` for each seed, with copies of the network."""
        network = copy.deepcopy(self.network)
        return [Draw(network, self.kind, self.settings.quantiles, seed) for seed in seeds]

    def no_choices(self, count: int) -> Choices:
        """Return ``(count,)`` empty choices."""
        found = np.zeros(count, self.kind)
        found["q"] = np.nan
        return found

    def remember(
        self, plan: EpochPlan, leftover: int, orders: Indices, choices: NDArray[np.uint8]
    ) -> float | None:
        """Keep the choices that formed an epoch's mini-batches.

        Args:
            plan: the plan of the epoch.
            leftover: number of samples at the beginning of the plan that were not grouped.
            orders: ``(W, n)`` samples in grouped order, from all ranks.
            choices: ``(W, n, choice_bytes)`` choices that led to them.

        Returns:
            The mean of q; None if nothing was chosen.
        """
        batch = plan.batch_size
        made = from_bytes(choices, self.kind)
        # The first pair's mini-batch does not depend on how the pair was chosen.
        made["q"].reshape(-1, batch)[:, 0] = np.nan
        self.table = self.no_choices(len(plan.order))
        self.table[np.ravel(orders)] = made
        # The last mini-batch that begins with leftover samples is filled with pairs of other
        # mini-batches.
        self.table["q"][plan.order[: -(-leftover // batch) * batch]] = np.nan
        q = self.table["q"][~np.isnan(self.table["q"])]
        return float(q.mean(dtype=np.float64)) if len(q) else None

    def before_step(self, step: StepAhead, together: bool) -> AfterStep | None:
        """Reward the choices that formed a mini-batch by how much its language loss falls."""
        # An order from a file (`first_order`) was not formed by choices.
        if self.table is None or step.number % self.settings.every:
            return None

        def loss() -> float:
            # With the seed of the step, the same words are hidden before and after it.
            with step.autocast():
                backbone = step.model.step_backbone
                return language_loss(step.model, backbone, step.samples, step.seed).item()

        before = loss()

        def after(taken: bool) -> dict[str, float]:
            fall = before - loss() if taken else math.nan
            self.learn(step.samples["index"].cpu().numpy(), fall, together)
            return {_FALL: fall if math.isfinite(fall) else 0.0}

        return after

    def learn(self, index: Indices, reward: float, together: bool = False) -> None:
        """Take a step that makes choices more probable if they lowered the language loss.

        The gradient is the mean, over all choices of all ranks, of ``(r - b) / s`` times that of
        log pi(q): REINFORCE with the running mean b and standard deviation s of the rewards. But
        choices were drawn up to an epoch ago, by an earlier network: without a bound, choices that
        were worse than usual would be pushed away for ever, to q = 0 or 1. So, as in PPO (eq. 7),
        log pi(q) is replaced by the ratio of the densities now and at the draw, clipped to 1 - clip
        and 1 + clip. It has the same gradient where the densities are equal.

        Args:
            index: ``(B,)`` samples of this rank's mini-batch.
            reward: r, the decrease of the mini-batch's language loss by training on it; ignored if
                it is not finite.
            together: average over all ranks, which must all call this method.
        """
        count, mean, deviation = self._baseline()
        used = self._choices_of(index) if math.isfinite(reward) and count >= FIRST_REWARDS else None
        advantage = (reward - mean) / max(deviation, 1e-12) if used is not None else 0.0
        advantage = min(_LARGEST_ADVANTAGE, max(-_LARGEST_ADVANTAGE, advantage))
        parts = [torch.zeros(sum(p.numel() for p in self.network.parameters()))]
        if used is not None and len(used):
            self.network.zero_grad()
            self._objective(used, advantage).neg().backward()  # type: ignore[no-untyped-call]
            parts = [p.grad.reshape(-1) for p in self.network.parameters() if p.grad is not None]
        finite = math.isfinite(reward)
        r = reward if finite else 0.0
        figures = [0.0 if used is None else float(len(used)), r, r * r, float(finite)]
        total = torch.cat([*(part.double() for part in parts), torch.tensor(figures).double()])
        if together:
            total = _sum_over_ranks(total)
        choices, *rewards = total[-4:].tolist()
        if choices:
            self._step(total[:-4] / choices)
        if rewards[2]:
            decay, number = self.settings.decay, rewards[2]
            means = [one / number for one in rewards]
            self._rewards = [
                decay * old + (1.0 - decay) * new
                for old, new in zip(self._rewards, means, strict=True)
            ]
            self._updates += 1

    def _objective(self, choices: Choices, advantage: float) -> Tensor:
        """Return the sum (scalar) of PPO's clipped objective over choices with the same
        advantage."""
        at_draw = torch.from_numpy(choices["density"].copy())
        ratio = (_log_densities(self.network, choices) - at_draw).exp()
        held = ratio.clamp(1.0 - self.settings.clip, 1.0 + self.settings.clip)
        return torch.minimum(advantage * ratio, advantage * held).sum()

    def _choices_of(self, index: Indices) -> Choices:
        if self.table is None:
            return np.empty(0, self.kind)
        found = self.table[index]
        return found[~np.isnan(found["q"])]

    def _baseline(self) -> tuple[int, float, float]:
        """Return the number of rewards, their running mean and their standard deviation."""
        total, squares, weight = self._rewards
        if not weight:
            return 0, 0.0, 0.0
        mean = total / weight
        return self._updates, mean, math.sqrt(max(0.0, squares / weight - mean * mean))

    def _step(self, gradient: Tensor) -> None:
        begin = 0
        for parameter in self.network.parameters():
            part = gradient[begin : begin + parameter.numel()]
            parameter.grad = part.to(parameter.dtype).view_as(parameter)
            begin += parameter.numel()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return network, optimizer, baseline and choices as plain tensors and numbers."""
        return {
            "network": copy.deepcopy(self.network.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "rewards": list(self._rewards),
            "updates": self._updates,
            "table": None if self.table is None else torch.from_numpy(as_bytes(self.table)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._rewards, self._updates = list(state["rewards"]), state["updates"]
        table = state["table"]
        self.table = None if table is None else from_bytes(table.numpy(), self.kind)


def _log_densities(network: nn.Module, choices: Choices) -> Tensor:
    """Return log pi(q) ``(A,)`` of choices under a network."""
    alpha, beta = network(torch.from_numpy(choices["seen"].astype(np.float32)))
    density: Any = torch.distributions.Beta(alpha, beta)
    found: Tensor = density.log_prob(torch.from_numpy(choices["q"].copy()))
    return found


def as_bytes(choices: Choices) -> NDArray[np.uint8]:
    """Return choices ``(n,)`` as bytes ``(n, bytes of a choice)``, since tensors have no
    records."""
    rows = np.ascontiguousarray(choices).view(np.uint8)
    return rows.reshape(len(choices), choices.dtype.itemsize).copy()


def from_bytes(rows: NDArray[np.uint8], kind: np.dtype[Any]) -> Choices:
    """Undo `as_bytes`, flattening all axes but the last."""
    found: Choices = rows.copy().reshape(-1).view(kind)
    return found


@torch.no_grad()
def language_loss(
    model: nn.Module, backbone: Backbone, samples: Mapping[str, Any], seed: int
) -> Tensor:
    """Return the mean language loss of a mini-batch's own pairs (scalar), without training.

    The model is in evaluation mode, and MLM hides the same words in every call with the same
    ``seed``, so that two calls differ only by the model's weights. The mode of each module and all
    random states are restored afterwards.

    Args:
        model: the model that ``backbone`` drives.
        samples: ``image`` ``(B, 3, H, W)`` and captions, as in
            `lavis_mafa.algorithm.step.run_step`.
        seed: seed of the words that MLM hides.
    """
    images: Tensor = samples["image"]
    with evaluating(model), torch.random.fork_rng([images.device.index] if images.is_cuda else []):
        torch.manual_seed(seed)
        encoded, texts = backbone.encode_images(images), backbone.encode_texts(captions_of(samples))
        own = torch.arange(len(images), device=encoded.embeds.device)
        return backbone.language_losses(encoded, texts, own, own).float().mean()


def _sum_over_ranks(values: Tensor) -> Tensor:
    device = torch.device("cuda" if dist.get_backend() == dist.Backend.NCCL else "cpu")
    values = values.to(device)
    dist.all_reduce(values)
    return values.cpu()
