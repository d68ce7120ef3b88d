"""FALCON as a schedule of one's own: what its network reads, draws and learns, on all ranks."""

import copy
import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import mini_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from two_ranks import on_two_ranks

from lavis_mafa import load_model
from lavis_mafa.algorithm.grit import HARDNESS, GritCollector, GritSchedule, GritSettings
from lavis_mafa.algorithm.grit.hardness import StepAhead
from lavis_mafa.training.state import _share_out

BEFORE = HARDNESS.entries()
from research import falcon  # noqa: E402
from research.falcon import (  # noqa: E402
    FIRST_REWARDS,
    LearnedHardness,
    LearnedSettings,
    _log_densities,
    _similarity_quantiles,
    from_bytes,
)

REGISTERED = HARDNESS.entries()
HARDNESS._entries = BEFORE  # only the tests of this file know it

SIZE, BATCH, M = 96, 8, 24
OWN = LearnedSettings(quantiles=5, width=12, lr=0.01)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(HARDNESS, "_entries", REGISTERED)


def grit_settings(own=OWN, **changes):
    given = {"enabled": True, "queue_size": 48, "search_space": M, "schedule": "learned"}
    return GritSettings(**{**given, "own": {"learned": own}, **changes})


def features_of(index):
    g = torch.Generator().manual_seed(0)
    table = F.normalize(torch.randn(4 * SIZE, 6, generator=g), dim=1)
    return table[index], table[index].flip(1)


def collect(schedule, batch):
    index = torch.from_numpy(batch.copy())
    schedule.collect(index, *features_of(index))


def reward_of(index):
    """A reward that depends on the samples of the mini-batch only."""
    return float(np.sin(np.asarray(index)).sum())


def learn(schedule, number, batch):
    """Reward the hardness, if it wants that; return whether it did."""
    losses = iter([reward_of(batch), 0.0])
    with mock.patch.object(
        falcon, "language_loss", lambda *step: torch.tensor(next(losses)).double()
    ):
        samples = {"index": torch.from_numpy(batch.copy())}
        after = schedule.before_step(StepAhead(number, mock.Mock(), samples))
        return after is not None and bool(after(True))


def train(schedule, epochs, first=0, rank=0, stop=None, first_step=0):
    """Train on every mini-batch, which rewards the hardness where it wants that; return orders."""
    orders = []
    for epoch in range(first, epochs):
        if not first_step:
            if schedule.settings.naive and schedule.wants_grouped(epoch):
                schedule.collect_first(epoch, vectors)
            schedule.begin(epoch)
        orders.append(schedule.plan.order.tolist())
        for step, batch in enumerate(schedule.plan.mini_batches(rank)):
            if step < first_step:
                continue
            if (epoch, step) == stop:
                return orders
            learn(schedule, step, batch)
            collect(schedule, batch)
        first_step = 0
        schedule.end(epoch)
    return orders


def vectors(plan):
    for batch in plan.mini_batches(0):
        index = torch.from_numpy(batch.copy())
        yield (index, *features_of(index))


# What the network reads


@settings(max_examples=40)
@given(
    size=st.sampled_from([1, 2, 3, 7, 40, 257, 300]),
    count=st.integers(2, 20),
    seed=st.integers(0, 1000),
)
def test_quantiles_equal_slow_loop(size, count, seed):
    sims = np.random.default_rng(seed).uniform(-2, 2, (size, size)).astype(np.float32)
    np.fill_diagonal(sims, 9.0)  # an own pair must not show
    given = sims.copy()
    found = _similarity_quantiles(sims, count)
    assert found.shape == (size, count) and np.array_equal(sims, given)
    for anchor in range(size):
        others = sorted(sims[anchor, other] for other in range(size) if other != anchor)
        for place in range(count):
            expected = 0.0
            if others:
                expected = others[round(place / (count - 1) * (len(others) - 1))]
            assert found[anchor, place] == np.float16(expected)


def test_network_equals_its_equations():
    network = LearnedHardness(1.0, OWN).network
    seen = np.random.default_rng(0).uniform(-2, 2, (7, 5)).astype(np.float32)
    weights = {name: value.numpy() for name, value in network.state_dict().items()}

    def layer(name, inputs):
        return weights[f"{name}.weight"] @ inputs + weights[f"{name}.bias"]

    def gelu(values):
        return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in values])

    alpha, beta = network(torch.from_numpy(seen))
    for row, *found in zip(seen, alpha.tolist(), beta.tolist(), strict=True):
        softmax = np.exp(row) / np.exp(row).sum()
        hidden = gelu(layer("first", 5 * softmax))
        for number in (0, 1):
            hidden = hidden + gelu(layer(f"hidden.{number}", hidden))
        expected = 1 + np.log1p(np.exp(layer("last", hidden)))
        assert found == pytest.approx(expected.tolist(), rel=1e-5)


# What is drawn, and what it is kept with


def quantile(candidates, scores, q):
    """The candidate of rank round((1 - q) * (n - 1)), 0 the most similar."""
    ranked = sorted(candidates, key=lambda other: (-scores[other], other))
    return ranked[round((1 - q) * (len(ranked) - 1))]


def test_choices_are_those_that_led_to_the_pairs():
    """From the collected choices alone the order follows, by a slow loop."""
    learned = LearnedHardness(1.0, OWN)
    collector = GritCollector(
        GritSettings(queue_size=M, search_space=M, shuffle=False), BATCH, seed=3, hardness=learned
    )
    samples = torch.arange(M)
    collector.collect(samples, *features_of(samples))
    order = collector.finish().tolist()
    images, texts = features_of(samples)
    one = images @ texts.t()
    sums = (one + one.t()).numpy()
    seen = _similarity_quantiles(sums, 5)
    chosen = from_bytes(collector.choices, learned.kind)
    assert np.isnan(chosen["q"][0]) and not np.isnan(chosen["q"][1:]).any()
    for place in range(1, M):
        anchor, q = order[place - 1], float(chosen["q"][place])
        assert 0 < q < 1
        assert np.array_equal(chosen["seen"][place], seen[anchor])
        left = [other for other in range(M) if other not in order[:place]]
        assert order[place] == quantile(left, sums[anchor].tolist(), q)
    assert len(set(chosen["q"][1:].tolist())) == M - 1


# Learning


def filled(own=OWN, rewards=FIRST_REWARDS):
    """Return a hardness with a table of random choices and a baseline."""
    learned = LearnedHardness(1.0, own)
    rng = np.random.default_rng(0)
    learned.table = learned.no_choices(SIZE)
    learned.table["seen"] = np.sort(rng.uniform(-2, 2, (SIZE, own.quantiles)), axis=1)
    learned.table["q"] = rng.uniform(0.01, 0.99, SIZE)
    with torch.no_grad():
        learned.table["density"] = _log_densities(learned.network, learned.table).numpy()
    learned.table["q"][::9] = np.nan
    for number in range(rewards):
        learned.learn(np.arange(BATCH), math.cos(number))
    return learned


def slow_log_density(network, choice):
    """log of q^(a-1) (1-q)^(b-1) / B(a, b)."""
    seen = torch.from_numpy(choice["seen"].astype(np.float32))[None]
    alpha, beta = (one.squeeze() for one in network(seen))
    q = torch.tensor(float(choice["q"]))
    log_b = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
    return (alpha - 1) * q.log() + (beta - 1) * (1 - q).log() - log_b


def slow_objective(network, choice, advantage, clip=OWN.clip):
    ratio = slow_log_density(network, choice).exp() / math.exp(choice["density"])
    if advantage > 0 and ratio > 1 + clip or advantage < 0 and ratio < 1 - clip:
        return torch.tensor(0.0)  # it has moved far enough: no gradient
    return advantage * ratio


def weighted(rewards, decay=OWN.decay):
    """Pair the rewards with their weights in a running mean."""
    ages = reversed(range(len(rewards)))
    return [((1 - decay) * decay**age, reward) for age, reward in zip(ages, rewards, strict=True)]


def slow_update(network, optimizer, table, mini_batches, rewards, earlier, decay):
    """One policy gradient step of several ranks, choice by choice."""
    total = sum(w for w, _ in weighted(earlier, decay))
    mean = sum(w * r for w, r in weighted(earlier, decay)) / total
    square = sum(w * r * r for w, r in weighted(earlier, decay)) / total
    deviation = math.sqrt(square - mean**2)
    terms = []
    for index, reward in zip(mini_batches, rewards, strict=True):
        for sample in index:
            if not math.isnan(table["q"][sample]):
                advantage = min(5.0, max(-5.0, (reward - mean) / deviation))
                terms.append(slow_objective(network, table[sample], advantage))
    optimizer.zero_grad()
    (-sum(terms) / len(terms)).backward()
    optimizer.step()


@pytest.mark.parametrize("reward", [0.3, -7.0, 40.0])
def test_a_step_equals_a_slow_loop(reward):
    learned = filled()
    network = copy.deepcopy(learned.network)
    optimizer = torch.optim.Adam(network.parameters(), lr=OWN.lr)
    earlier = [math.cos(number) for number in range(FIRST_REWARDS)]
    for index in (np.arange(10, 18), np.arange(50, 60)):
        slow_update(network, optimizer, learned.table, [index], [reward], earlier, OWN.decay)
        earlier.append(reward)
        learned.learn(index, reward)
        for found, expected in zip(learned.network.parameters(), network.parameters(), strict=True):
            assert torch.allclose(found, expected, atol=2e-6)


# Threads, resumption, ranks


def same_state(state, other):
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(same_state(state[k], other[k]) for k in state)
    if isinstance(state, list | tuple):
        return len(state) == len(other) and all(map(same_state, state, other))
    return torch.equal(state, other) if isinstance(state, torch.Tensor) else state == other


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("stop", [(1, 0), (2, 5), (3, 11)])
def test_resumed_equals_uninterrupted(tmp_path, stop, naive):
    cfg = grit_settings(naive=naive, queue_size=40)
    size = SIZE + 3
    whole = GritSchedule(size, BATCH, cfg, seed=4)
    orders = train(whole, 5)
    assert whole.hardness._updates > FIRST_REWARDS and whole.plan.hardness is not None
    stopped = GritSchedule(size, BATCH, cfg, seed=4)
    train(stopped, 5, stop=stop)
    state = stopped.state_dict()
    torch.save(state, tmp_path / "state.pth")
    for batch in stopped.plan.mini_batches(0)[stop[1] :]:  # which must not change what was saved
        stopped.hardness.learn(batch, reward_of(batch) + 1.0)
    assert same_state(state, torch.load(tmp_path / "state.pth", weights_only=True))
    resumed = GritSchedule(size, BATCH, cfg, seed=4)
    saved = torch.load(tmp_path / "state.pth", weights_only=True)
    resumed.load_state_dict(saved, epoch=stop[0])
    # `first_step` 0 would begin the epoch again.
    if stop[1]:
        found = train(resumed, 5, first=stop[0], first_step=stop[1])
        assert found == orders[stop[0] :]
    else:
        rest = resumed.plan.mini_batches(0)
        for step, batch in enumerate(rest):
            learn(resumed, step, batch)
            collect(resumed, batch)
        resumed.end(stop[0])
        assert train(resumed, 5, first=stop[0] + 1) == orders[stop[0] + 1 :]
    assert same_state(resumed.state_dict(), whole.state_dict())


def test_choices_of_several_ranks_are_shared_out_with_their_pairs():
    states, known = [], {}
    for rank in range(2):
        learned = LearnedHardness(1.0, OWN)
        collector = GritCollector(
            GritSettings(queue_size=M, search_space=M), BATCH, seed=rank, hardness=learned
        )
        samples = torch.arange(30) + 100 * rank
        collector.collect(samples, *features_of(samples))
        states.append(collector.state_dict())
        choices = from_bytes(states[-1]["choices"].numpy(), learned.kind)
        known.update(zip(states[-1]["order"].tolist(), choices.tolist(), strict=True))
    shared = _share_out(states, 3)
    for state in shared:
        choices = from_bytes(state["choices"].numpy(), learned.kind)
        assert len(choices) == len(state["order"])
        for sample, choice in zip(state["order"].tolist(), choices, strict=True):
            assert str(known[sample]) == str(choice.tolist())
    assert sum(len(state["order"]) for state in shared) == 48


def train_on_rank(rank):
    """Train a schedule, and take a step by itself; return the states of both."""
    schedule = GritSchedule(2 * SIZE + 5, BATCH, grit_settings(), rank, 2, seed=4)
    train(schedule, 4, rank=rank)
    learned = filled()
    learned.learn(np.arange(BATCH) + 40 * rank, [0.7, -0.2][rank], together=True)
    return schedule.state_dict(), learned.state_dict()


def test_two_ranks_learn_the_same_from_different_mini_batches(tmp_path):
    states, steps = zip(*on_two_ranks(train_on_rank, tmp_path), strict=True)
    assert same_state(states[0]["hardness"], states[1]["hardness"])
    assert same_state(states[0]["next_plan"], states[1]["next_plan"])
    start = LearnedHardness(1.0, OWN).network.state_dict()
    learnt = states[0]["hardness"]["network"]
    assert not torch.equal(start["last.bias"], learnt["last.bias"])
    # One step against the loop over the choices of both ranks, in one process.
    assert same_state(steps[0], steps[1])
    learned = filled()
    network = copy.deepcopy(learned.network)
    optimizer = torch.optim.Adam(network.parameters(), lr=OWN.lr)
    earlier = [math.cos(number) for number in range(FIRST_REWARDS)]
    of_ranks = [np.arange(BATCH), np.arange(BATCH) + 40]
    slow_update(network, optimizer, learned.table, of_ranks, [0.7, -0.2], earlier, OWN.decay)
    for name, value in network.state_dict().items():
        assert torch.allclose(steps[0]["network"][name], value, atol=2e-6), name


def test_rewards_are_wanted_in_grouped_epochs_at_every_nth_step(tmp_path):
    schedule = GritSchedule(SIZE, BATCH, grit_settings(LearnedSettings(every=3)))
    schedule.begin(0)
    batch = np.arange(BATCH)
    assert not learn(schedule, 0, batch)
    schedule = GritSchedule(SIZE, BATCH, grit_settings(LearnedSettings(every=3)))
    train(schedule, 1)
    schedule.begin(1)
    assert [learn(schedule, step, batch) for step in range(7)] == [True, False, False] * 2 + [True]
    np.save(tmp_path / "order.npy", np.arange(SIZE))
    given = GritSchedule(SIZE, BATCH, grit_settings(first_order=str(tmp_path / "order.npy")))
    assert given.begin(0).grouped and not learn(given, 0, batch)
    constant = GritSchedule(SIZE, BATCH, grit_settings(schedule="constant"))
    train(constant, 1)
    constant.begin(1)
    assert not learn(constant, 0, batch)


# The reward


def model_of(name):
    torch.manual_seed(0)
    model = load_model(name, "tiny")
    model.train()
    return model


@pytest.mark.parametrize("name", ["albef_mafa", "blip_mafa", "blip2_mafa"])
def test_it_is_the_step_s_loss_of_the_own_pairs(name, toy_train):
    model, samples = model_of(name), mini_batch(toy_train, range(6))
    found = falcon.language_loss(model, model.backbone, samples, seed=5)
    assert not found.requires_grad and found.dtype == torch.float32
    model.eval()
    model.con_d = None  # which would add mined pairs
    torch.manual_seed(5)
    assert found.item() == pytest.approx(model(samples).loss_lm.item(), rel=1e-5)


def test_it_leaves_everything_as_it_was(toy_train):
    model, samples = model_of("albef_mafa"), mini_batch(toy_train, range(6))
    next(model.children()).eval()  # such as a frozen part
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    assert any(modes) and not all(modes)
    first = falcon.language_loss(model, model.backbone, samples, seed=5)
    torch.rand(3)
    assert torch.equal(first, falcon.language_loss(model, model.backbone, samples, seed=5))
    torch.set_rng_state(state)
    with pytest.raises(KeyError):
        falcon.language_loss(model, model.backbone, {"image": samples["image"]}, seed=6)
    assert torch.equal(state, torch.get_rng_state())
    assert [module.training for module in model.modules()] == modes


def test_a_config_needs_the_language_loss():
    assert not list(LearnedHardness.problems_of({"model.mafa.loss_weights.lm": 1.0}))
    ((key, why, _),) = LearnedHardness.problems_of({"model.mafa.loss_weights.lm": 0})
    assert key == "run.grit.schedule" and "needs the language loss" in why
