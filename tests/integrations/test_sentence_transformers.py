"""The loss beside sentence-transformers' own, and trainings with its trainer."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6")
pytest.importorskip("datasets")

import tokenizers  # noqa: E402
from datasets import Dataset  # noqa: E402
from runs import finish, launcher, spawn  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402
from sentence_transformers.sentence_transformer.losses import (  # noqa: E402
    GISTEmbedLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import StaticEmbedding  # noqa: E402
from tiny_sentences import GROUPED, cross_encoder, encoder, pairs, train  # noqa: E402

from lavis_mafa import (  # noqa: E402
    GritSchedule,
    GritSettings,
    MiningRule,
    SoftLabels,
    StepSettings,
)
from lavis_mafa.integrations.grit_callback import GroupedOrder  # noqa: E402
from lavis_mafa.integrations.sentence_transformers import (  # noqa: E402
    Grit,
    MinedLoss,
    PairJudge,
)

SYMMETRIC = {
    "directions": ("query_to_doc", "doc_to_query"),
    "partition_mode": "per_direction",
}
ONE_HOT = {"detach_other": False, "soft_labels": SoftLabels("one_hot")}


def columns_of(model, data, count=8):
    return [model.preprocess(data[:count][name]) for name in ("anchor", "positive")]


def gradients(loss, model, columns, labels=None):
    model.zero_grad()
    value = loss([dict(one) for one in columns], labels)
    value.backward()
    return value.item(), [one.grad.clone() for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("negatives", [0, 1, 2])
@pytest.mark.parametrize("parts", [{}, {"mini_batch_size": 3}, {"mini_batch_num_tokens": 14}])
def test_without_mining_it_is_the_librarys_loss(tmp_path, parts, negatives):
    model = encoder(tmp_path)
    columns = columns_of(model, pairs())
    columns += [columns_of(model, pairs(seed=7 + n))[1] for n in range(negatives)]
    found = gradients(MinedLoss(model, **parts), model, columns)
    expected = gradients(MultipleNegativesRankingLoss(model, **SYMMETRIC), model, columns)
    assert found[0] == pytest.approx(expected[0], rel=1e-5) and len(found[1]) == len(expected[1])
    for one, other in zip(found[1], expected[1], strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("reads", ["rows", "texts", "shuffled rows"])
def test_a_cross_encoder_judges_the_hardest(tmp_path, reads):
    """Its probabilities are those of its own `predict`, and what it accepts is a positive."""
    data, model, cross = pairs(), encoder(tmp_path), cross_encoder(tmp_path)
    rule = MiningRule(low=0.0, high=0.0)  # every judged pair is a positive
    judge = {
        "rows": PairJudge(cross, data),
        "texts": cross,
        "shuffled rows": PairJudge(cross, data.shuffle(seed=2)),
    }[reads]
    loss = MinedLoss(model, settings=StepSettings(**ONE_HOT, connections=rule), judge=judge)
    model.eval()
    places = torch.tensor([7, 3, 30, 12])
    rows = torch.tensor(data[places.tolist()]["label"])
    columns = [model.preprocess(data[places.tolist()][name]) for name in ("anchor", "positive")]
    with torch.no_grad():
        found = loss([dict(one) for one in columns], rows).item()
        a, b = (model(dict(one))["sentence_embedding"] for one in columns)
    sim = 20 * torch.nn.functional.cosine_similarity(a[:, None], b[None], dim=-1)
    hard = sim.masked_fill(torch.eye(4, dtype=torch.bool), -99).argmax(1)
    hard_of_texts = sim.t().masked_fill(torch.eye(4, dtype=torch.bool), -99).argmax(1)
    expected = 0.0
    for of, scores in ((hard, sim), (hard_of_texts, sim.t())):
        labels = 0.5 * (torch.eye(4) + torch.nn.functional.one_hot(of, 4))
        expected -= (labels * scores.log_softmax(1)).sum().item() / 8
    assert found == pytest.approx(expected, rel=1e-4)
    samples = {
        "loaded_index": rows,
        "pair_texts": [data[places.tolist()][name] for name in ("anchor", "positive")],
    }
    probabilities = loss.parts.con_d.judge(samples, torch.tensor([0, 2]), torch.tensor([1, 0]))
    texts = [(data[7]["anchor"], data[3]["positive"]), (data[30]["anchor"], data[7]["positive"])]
    theirs = cross.predict(texts, activation_fn=torch.nn.Sigmoid())
    assert probabilities.tolist() == pytest.approx(theirs.tolist(), rel=1e-4)


@pytest.mark.parametrize("margin", [0.0, 0.1])
def test_a_guide_leaves_out_what_gistembed_leaves_out(tmp_path, margin):
    """In both directions, without contrasts within a column."""
    model, guide = encoder(tmp_path), encoder(tmp_path, seed=5)
    columns = columns_of(model, pairs())
    theirs = GISTEmbedLoss(
        model, guide, 1 / 20, margin=margin, contrast_anchors=False, contrast_positives=False
    )
    both = [gradients(theirs, model, given) for given in (columns, columns[::-1])]
    found = gradients(MinedLoss(model, judge=guide, margin=margin), model, columns)
    plain = gradients(MinedLoss(model), model, columns)
    assert found[0] == pytest.approx((both[0][0] + both[1][0]) / 2, rel=1e-5)
    assert found[0] != pytest.approx(plain[0], rel=1e-3)
    for one, i2t, t2i in zip(found[1], both[0][1], both[1][1], strict=True):
        assert torch.allclose(one, (i2t + t2i) / 2, atol=1e-5)


def test_plain_arguments_are_settings(tmp_path):
    model = encoder(tmp_path)
    rule = MiningRule(score="similarity", rule="margin", top_k=0, action="drop")
    labels = SoftLabels("smoothed", alpha=0.1)
    settings = StepSettings(
        soft_labels=labels, connections=rule, own={"margin": {"margin": 0.2}}, same_group="positive"
    )
    plain = MinedLoss(model, margin=0.2, action="drop", alpha=0.1)
    columns = columns_of(model, pairs())
    whole = MinedLoss(model, settings=settings)
    assert plain(columns).item() == whole(columns_of(model, pairs())).item()
    assert plain(columns).item() != MinedLoss(model)(columns).item()


@pytest.mark.parametrize("column", [0, 1])
def test_rows_with_equal_texts_are_not_judged_as_negatives(tmp_path, column):
    """The hardest candidates of rows 0 and 1 would be each other's."""
    model = encoder(tmp_path)
    name = ("anchor", "positive")[column]
    texts = dict(pairs()[:6])
    texts[name] = [texts[name][0], *texts[name][:1], *texts[name][2:]]
    columns = [model.preprocess(texts[one]) for one in ("anchor", "positive")]
    loss = MinedLoss(model, judge=cross_encoder(tmp_path), top_k=0)
    loss(columns)
    for side in (loss.output.i2t, loss.output.t2i):
        picked = {*zip(side.anchor.tolist(), side.hard.tolist(), strict=True)}
        assert not picked & {(0, 1), (1, 0)}
        assert {(0, 2), (1, 2), (2, 0)} <= picked


def test_what_the_loss_cannot_use_is_refused(tmp_path):
    model = encoder(tmp_path)
    columns = columns_of(model, pairs())
    with pytest.raises(ValueError, match="got 1 columns, expected anchor, positive"):
        MinedLoss(model)(columns[:1])
    with pytest.raises(ValueError, match="negatives that are in no pair, .*sigmoid cannot use"):
        MinedLoss(model, itc_loss="sigmoid")([*columns, columns[0]])
    with pytest.raises(TypeError, match="no argument 'contrast_anchors': use GISTEmbedLoss"):
        MinedLoss(model, contrast_anchors=True)
    with pytest.raises(TypeError, match="'margn'; did you mean margin"):
        MinedLoss(model, rule="margin", margn=0.1)
    with pytest.raises(ValueError, match=r"type must be .*, got SoftLabels\("):
        MinedLoss(model, soft_labels=SoftLabels())
    with pytest.raises(TypeError, match="got settings and high: give one or the other"):
        MinedLoss(model, settings=StepSettings(), high=0.9)
    with pytest.raises(ValueError, match="high must be from 0 to 1, got 2"):
        MinedLoss(model, high=2.0)
    with pytest.raises(ValueError, match="no row numbers: .* train on numbered"):
        MinedLoss(model, judge=PairJudge(cross_encoder(tmp_path), pairs()))(columns)
    with pytest.raises(TypeError, match="judge: got 'captions', expected a CrossEncoder"):
        MinedLoss(model, judge="captions")
    with pytest.raises(ValueError, match="got judge and score='similarity', which judges in its"):
        MinedLoss(model, judge=cross_encoder(tmp_path), score="similarity")
    with pytest.raises(TypeError, match="grit: got True, expected Grit"):
        MinedLoss(model, grit=True)
    with pytest.raises(TypeError, match="'mini_batch_sise'; did you mean mini_batch_size"):
        MinedLoss(model, mini_batch_sise=4)
    with pytest.raises(ValueError, match="margin must be from -1 to 1, got True"):
        MinedLoss(model, margin=True)
    with pytest.raises(ValueError, match="momentum needs momentum encoders"):
        MinedLoss(model, soft_labels="momentum")
    with pytest.raises(ValueError, match="must be above 0, got 0"):
        MinedLoss(model, scale=0.0)
    with pytest.raises(TypeError, match="settings: got 20.0, expected StepSettings"):
        MinedLoss(model, 20.0)
    rule = MiningRule(score="similarity", rule="global_threshold", top_k=0, action="drop")
    with pytest.raises(ValueError, match="keeps state for each row .* give grit"):
        MinedLoss(model, settings=StepSettings(**ONE_HOT, connections=rule))


@pytest.mark.parametrize(
    "settings",
    [
        {"rince": {"exponent": 0.3}},
        {"posterior": {"prior": 0.1}},
        {"high": 0.9, "margin": 0.1},
        {"weight": 0.3},
        {"alpha": 0.1, "soft_labels": "one_hot"},
        {"label_smoothing": 0.1, "soft_labels": "smoothed"},
        {"low": 0.2, "score": "con_d"},
        {"negatives": "uniform"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_setting_that_nothing_reads_is_refused(tmp_path, settings):
    name = next(iter(settings))
    with pytest.raises(TypeError, match=f"{name}.*: no effect with rule=.* and no judge: leave it"):
        MinedLoss(encoder(tmp_path), **settings)


def test_static_embeddings_are_judged(tmp_path):
    """Their texts are one row of tokens with the places where each begins."""
    words = tokenizers.Tokenizer.from_str(encoder(tmp_path).tokenizer.backend_tokenizer.to_str())
    model = SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=16)], device="cpu")
    data = pairs()[:8]
    data["anchor"][1] = data["anchor"][0]
    columns = [model.preprocess(data[name]) for name in ("anchor", "positive")]
    plain = MultipleNegativesRankingLoss(model, **SYMMETRIC)(columns, None)
    assert MinedLoss(model)(columns).item() == pytest.approx(plain.item())
    cross = _Reading()
    loss = MinedLoss(model, judge=cross)
    loss(columns)
    assert cross.read and {text for pair in cross.read for text in pair} <= texts_of(data)
    assert loss.output.i2t.positives.sum() == 10
    with pytest.raises(ValueError, match="nor with StaticEmbedding: leave them out"):
        MinedLoss(model, mini_batch_size=3)(columns)


def test_the_second_pass_drops_the_same_units(tmp_path):
    """One chunk of a column draws what the column draws; its gradient is that of the first pass."""
    model = encoder(tmp_path).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    columns, found = columns_of(model, pairs()), []
    for size in (None, 99):
        torch.manual_seed(0)
        found.append(gradients(MinedLoss(model, mini_batch_size=size), model, columns))
    (whole, expected), (chunked, second) = found
    assert whole == chunked
    for one, other in zip(second, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_model_in_half_precision_has_the_librarys_loss(tmp_path):
    model = encoder(tmp_path).to(torch.bfloat16)
    columns = columns_of(model, pairs())
    found = gradients(MinedLoss(model), model, columns)
    expected = gradients(MultipleNegativesRankingLoss(model, **SYMMETRIC), model, columns)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)


def test_a_loss_that_has_run_is_copied_and_pickled(tmp_path):
    """And holds no graph of its last step."""
    model = encoder(tmp_path)
    loss = MinedLoss(model, settings=StepSettings(**ONE_HOT, itc_loss="sigmoid"))
    loss(columns_of(model, pairs())).backward()
    assert not loss.output.loss.requires_grad
    again = pickle.loads(pickle.dumps(copy.deepcopy(loss)))
    columns = columns_of(again.model, pairs())
    assert again(columns).item() == loss(columns_of(model, pairs())).item()


def test_a_model_card_names_the_loss(tmp_path):
    model = encoder(tmp_path)
    found = MinedLoss(model, judge=cross_encoder(tmp_path)).get_config_dict()
    assert found["scale"] == 20.0 and found["judge"] == "CrossEncoder"
    assert "MAFA" in MinedLoss(model).citation


class _Reading:
    """A CrossEncoder that remembers what it reads."""

    num_labels = 1

    def __init__(self):
        self.read = set()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def parameters(self):
        yield self.weight

    def predict(self, pairs, **options):
        self.read |= {tuple(pair) for pair in pairs}
        return torch.zeros(len(pairs))


def texts_of(data):
    return {*data["anchor"], *data["positive"]}


@pytest.mark.parametrize("numbers", [True, False])
def test_an_evaluation_set_is_never_judged_as_rows_of_training(tmp_path, numbers):
    data, other, model, cross = pairs(), pairs(8, seed=9), encoder(tmp_path), _Reading()
    loss = MinedLoss(model, settings=StepSettings(**ONE_HOT), judge=PairJudge(cross, data))
    model.eval()
    rows = torch.tensor(other["label"]) if numbers else None
    found = loss(columns_of(model, other), rows)
    assert not cross.read
    assert found.item() == MinedLoss(model)(columns_of(model, other)).item()
    # The trainer evaluates the model inside of DDP's or DataParallel's wrapper.
    loss.model = torch.nn.DataParallel(model, device_ids=[])
    assert loss.model.training and loss(columns_of(model, other), rows).item() == found.item()
    loss.model = model
    by_texts = MinedLoss(model, settings=StepSettings(**ONE_HOT), judge=cross)
    by_texts(columns_of(model, other), rows)
    assert cross.read and {text for pair in cross.read for text in pair} <= texts_of(other)
    model.train()
    with pytest.raises(ValueError, match="8 of 8 rows of a mini-batch are not in the data set"):
        loss(columns_of(model, other), torch.tensor(other["label"]))


# Trainings: 36 rows in mini-batches of 4, 9 steps an epoch


def rows_of(folder, rank=0):
    lines = (Path(folder) / f"rows_{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer = train(folder, eval_strategy="epoch")
    return folder, trainer


def test_epochs_are_grouped_by_the_features_of_the_epoch_before(whole):
    folder, trainer = whole
    trained = [rows for rows, _ in rows_of(folder)]
    assert len(trained) == 27 and trainer.state.log_history[-1]["epoch"] == 3
    schedule = GritSchedule(36, 4, GROUPED, seed=3)
    for epoch in range(3):
        steps = slice(9 * epoch, 9 * epoch + 9)
        plan = schedule.begin(epoch)
        assert trained[steps] == plan.mini_batches(0).tolist() and plan.grouped == (epoch > 0)
        for collected in trainer.loss.collected[steps]:
            schedule.collect(*collected)
        schedule.end(epoch)


def test_a_resumed_run_is_the_uninterrupted_one(whole, tmp_path):
    """Stopped within a grouped epoch."""
    folder, trainer = whole
    train(tmp_path, steps=10)
    again = train(tmp_path, resume=True)
    assert rows_of(tmp_path) == rows_of(folder)
    ours, theirs = (one.model.state_dict() for one in (again, trainer))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_evaluation_on_the_training_set_leaves_the_order_of_training(whole, tmp_path):
    """The trainer makes loaders of all its data sets with the sampler that it has."""
    trainer = train(tmp_path, evaluation=pairs(), eval_strategy="steps", eval_steps=5)
    assert rows_of(tmp_path) == rows_of(whole[0])
    assert sum("eval_loss" in row for row in trainer.state.log_history) == 6


def test_an_order_is_resumed_without_the_number_of_its_epoch():
    """With several ranks, no data loader that skips mini-batches passes the number on."""
    schedule = GritSchedule(36, 4, GritSettings())
    order = GroupedOrder(schedule)
    for epoch in range(2):
        order.set_epoch(epoch)
        rows = list(order)
    assert list(GroupedOrder(schedule)) == rows


def test_a_checkpoint_without_its_order_is_refused(tmp_path):
    train(tmp_path, steps=5)
    (tmp_path / "out/checkpoint-5/grit_0.pth").unlink()
    with pytest.raises(ValueError, match="no .*grit_0.pth with the order of rows: move"):
        train(tmp_path, resume=True)


def test_a_checkpoint_is_resumed_from_its_place(tmp_path):
    """The trainer does not tell its callbacks from which folder it resumes."""
    train(tmp_path, steps=5)
    kept, new = tmp_path / "kept", tmp_path / "new"
    (tmp_path / "out/checkpoint-5").rename(kept)
    told = f"no {new}/checkpoint-5/grit_0.pth .*: move the checkpoint to {new}/checkpoint-5, or"
    with pytest.raises(ValueError, match=told):
        train(tmp_path, resume=str(kept), output_dir=str(new))


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"per_device_train_batch_size": 6}, "another mini-batch"),
        ({"order": 7}, "another seed"),
        ({"data": pairs().shuffle(seed=1)}, "another set or order of rows"),
        ({"data": pairs(40)}, "another number of rows, another set"),
    ],
)
def test_an_order_of_another_set_up_is_not_resumed(tmp_path, changes, what):
    train(tmp_path, steps=5)
    with pytest.raises(ValueError, match=f"written by a run with {what}"):
        train(tmp_path, resume=True, **changes)


@pytest.mark.parametrize("forgotten", ["callback", "data set"])
def test_a_trainer_that_does_not_know_of_grouping_is_refused(tmp_path, monkeypatch, forgotten):
    """It would train on random mini-batches, or in the order of the data."""
    if forgotten == "callback":
        monkeypatch.setattr(Grit, "on_train_begin", lambda *args, **rest: None)
    else:
        monkeypatch.setattr(Grit, "__init__", with_other_data(Grit.__init__))
    with pytest.raises(ValueError, match="Grit groups no mini-batches: give the trainer"):
        train(tmp_path, steps=2)


def with_other_data(begin):
    return lambda self, data, *args, **rest: begin(self, data.select(range(32)), *args, **rest)


def test_two_ranks_share_the_rows_of_an_epoch(tmp_path):
    script = Path(__file__).with_name("tiny_sentences.py")
    finish(spawn(tmp_path, [*launcher(2), script, tmp_path]))
    ranks = [rows_of(tmp_path / str(rank), rank) for rank in range(2)]
    assert [len(one) for one in ranks] == [12, 12]  # 4 steps an epoch; 4 rows are left over
    for epoch in range(3):
        rows = [sum((r for r, _ in one[4 * epoch : 4 * epoch + 4]), []) for one in ranks]
        assert len({*rows[0], *rows[1]}) == 32
    assert [loss for _, loss in ranks[0]] != [loss for _, loss in ranks[1]]


def test_rows_need_no_numbers_without_mining(tmp_path):
    data = Dataset.from_dict({"a": ["red dot"] * 4, "b": ["blue line"] * 4})
    model = encoder(tmp_path)
    columns = [model.preprocess(data[:4][name]) for name in ("a", "b")]
    assert MinedLoss(model)(columns).item() == pytest.approx(torch.log(torch.tensor(4.0)).item())


def test_thresholds_of_every_row_are_learned(tmp_path):
    """GloFND has two thresholds for each row of the data set that the trainer reads."""
    rule = MiningRule(score="similarity", rule="global_threshold", top_k=0, action="drop")
    loss = train(tmp_path, settings=StepSettings(**ONE_HOT, connections=rule), steps=4).loss
    learned = [one for name, one in loss.named_buffers() if name.endswith(("i2t", "t2i"))]
    assert [one.isfinite().sum().item() for one in learned] == [16, 16]  # rows of four mini-batches


def test_what_a_loss_learns_is_in_the_checkpoints(tmp_path):
    """A resumed run ends with the bias of the uninterrupted one."""
    settings = StepSettings(**ONE_HOT, itc_loss="sigmoid")
    whole = train(tmp_path / "whole", settings=settings)
    train(tmp_path / "parts", settings=settings, steps=10)
    again = train(tmp_path / "parts", settings=settings, resume=True)
    bias, expected = (one.loss.parts.form.relative_bias for one in (again, whole))
    assert torch.equal(bias, expected) and bias.item() != 1.0
    for file in (tmp_path / "parts/out").glob("*/mined_loss.pth"):
        file.unlink()
    with pytest.raises(ValueError, match="mined_loss.pth with what the loss learned: move a"):
        train(tmp_path / "parts", settings=settings, resume=True)


def test_what_a_loss_learns_is_equal_on_two_ranks(tmp_path):
    script = Path(__file__).with_name("tiny_sentences.py")
    finish(spawn(tmp_path, [*launcher(2), script, tmp_path, "sigmoid"]))
    biases = [json.loads((tmp_path / f"bias_{rank}.json").read_text()) for rank in range(2)]
    assert biases[0] == biases[1] != 1.0
