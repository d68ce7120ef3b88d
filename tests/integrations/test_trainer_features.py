"""Features of other trainers with the losses of this package: each works or is refused."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("accelerate")
sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6")
pytest.importorskip("datasets")

from datasets import Dataset, DatasetDict, concatenate_datasets  # noqa: E402
from sentence_transformers.base.sampler import RoundRobinBatchSampler  # noqa: E402
from sentence_transformers.sentence_transformer.losses import (  # noqa: E402
    AdaptiveLayerLoss,
    Matryoshka2dLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from test_transformers_trainer import MODELS  # noqa: E402
from tiny_sentences import GROUPED, cross_encoder, encoder, pairs  # noqa: E402
from torch.utils.data import ConcatDataset  # noqa: E402
from transformers import TrainerCallback, TrainingArguments  # noqa: E402

from lavis_mafa import GritSchedule, MiningRule, SoftLabels, StepSettings  # noqa: E402
from lavis_mafa.integrations.pair_loss import PairLoss  # noqa: E402
from lavis_mafa.integrations.rows import Rows  # noqa: E402
from lavis_mafa.integrations.sentence_transformers import (  # noqa: E402
    Grit,
    KeepLoss,
    MinedLoss,
    PairJudge,
    numbered,
)
from lavis_mafa.integrations.transformers import MinedTrainer  # noqa: E402

SETTINGS = StepSettings(soft_labels=SoftLabels("one_hot"), connections=MiningRule())
SYMMETRIC = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


class Gradients(TrainerCallback):
    """The norm of the gradient of every update."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **rest):
        self.norms.append(norm_of(model))


def norm_of(model):
    found = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
    return torch.cat(found).norm().item()


def arguments(folder, kind, **changes):
    given = {
        "output_dir": str(folder / "out"),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "max_grad_norm": 0,
        "lr_scheduler_type": "constant",
    }
    return kind(**{**given, **changes})


def train(folder, data=None, evaluation=None, judged=True, model=None, **changes):
    data, model = pairs() if data is None else data, model or encoder(folder)
    judge = cross_encoder(folder) if judged else None
    loss = MinedLoss(model, settings=SETTINGS, judge=judge)
    kind = sentence_transformers.SentenceTransformerTrainingArguments
    given = arguments(folder, kind, **changes)
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model, given, data, evaluation, loss=loss, callbacks=[KeepLoss(loss)]
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "changes",
    [
        {"bf16": True},
        {"fp16": True},
        {"gradient_checkpointing": True},
        {"dataloader_num_workers": 1},
        {"dataloader_drop_last": True, "max_steps": -1},
        {"gradient_accumulation_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True},
        {"prompts": {"anchor": "red: ", "positive": "blue: "}},
        {"batch_sampler": "no_duplicates"},
        {"torch_compile": True, "torch_compile_backend": "eager"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_sentence_transformers_trains_with(tmp_path, changes):
    data = pairs().remove_columns("label")  # a judge of texts needs no numbers
    trainer = train(tmp_path, data, data.select(range(6)), **changes)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) >= 2 and all(0 < float(loss) < 20 for loss in losses)
    assert trainer.loss.output.counts[:, 1].sum() > 0  # judged
    logged = [row["judged_negatives"] for row in trainer.state.log_history if "loss" in row]
    accumulated = changes.get("gradient_accumulation_steps", 1)
    assert len(logged) == len(losses) and max(logged) <= 8 * accumulated
    assert max(logged) > 4 * accumulated  # of 4 anchors and 4 positives
    if "eval_strategy" in changes:
        assert sum("eval_loss" in row for row in trainer.state.log_history) == 3


def test_several_data_sets_are_judged_by_their_own_texts(tmp_path):
    data = DatasetDict(one=pairs(16, seed=1), two=pairs(16, seed=2))
    trainer = train(tmp_path, data.remove_columns("label"), max_steps=-1, num_train_epochs=1)
    assert trainer.state.global_step == 8
    streamed = pairs().remove_columns("label").to_iterable_dataset()
    assert train(tmp_path, streamed).state.global_step == 2


def test_a_users_column_label_is_not_changed(tmp_path):
    data = pairs().remove_columns("label")
    data = data.add_column("label", [0.5 for _ in range(len(data))])
    assert train(tmp_path, data).loss.output.counts[:, 1].sum() > 0


def test_grouping_is_refused_where_it_cannot_be_had(tmp_path):
    data = pairs()
    grit = Grit(data, GROUPED)
    with pytest.raises(ValueError, match="has 36 rows, fewer than one mini-batch of 64"):
        grit.batch_sampler(data, 64)
    with pytest.raises(ValueError, match="no numbers in a column 'label'"):
        Grit(data.remove_columns("label"))
    twice = Dataset.from_list([*data.select(range(2)), *data.select(range(1))])
    with pytest.raises(ValueError, match="1 rows have the number of another row"):
        Grit(twice)
    orders = [[*grit.batch_sampler(data, 4, seed=seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    other = grit.batch_sampler(pairs(12, seed=5), 4)
    assert sorted(row for batch in other for row in batch) == list(range(12))


def test_a_sampler_of_several_data_sets_begins_each_epoch_of_grit():
    data, other = pairs(), pairs(12, seed=5)
    grit = Grit(data, GROUPED)
    both = [grit.batch_sampler(one, 4) for one in (data, other)]
    grit.on_train_begin(None, SimpleNamespace(global_step=0), None)
    sampler = RoundRobinBatchSampler(ConcatDataset([data, other]), both, torch.Generator(), 0)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append([*sampler])
        assert grit.schedule.epoch == epoch
    assert orders[0] != orders[1]


WRAPPERS = {
    "matryoshka": lambda model, loss: MatryoshkaLoss(model, loss, [16, 8, 4]),
    "matryoshka 2d": lambda model, loss: Matryoshka2dLoss(model, loss, [16, 8]),
    "adaptive layers": AdaptiveLayerLoss,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_losses_equal_the_librarys(tmp_path, wrapper):
    model = encoder(tmp_path)
    rows = pairs()[:8]

    def run(loss):
        model.zero_grad()
        torch.manual_seed(0)
        random.seed(0)  # Matryoshka2dLoss draws layers
        columns = [model.preprocess(rows[name]) for name in ("anchor", "positive")]
        value = WRAPPERS[wrapper](model, loss)(columns, None)
        value.backward()
        return value.item(), norm_of(model)

    theirs = run(MultipleNegativesRankingLoss(model, **SYMMETRIC))
    assert run(MinedLoss(model)) == pytest.approx(theirs, rel=1e-4)
    with pytest.raises(ValueError, match="do not work inside MatryoshkaLoss"):
        run(MinedLoss(model, mini_batch_size=3))


def test_a_wrapped_loss_collects_each_mini_batch_once(tmp_path):
    data, model = pairs(), encoder(tmp_path)
    grit = Grit(data, GROUPED)
    loss = MatryoshkaLoss(model, MinedLoss(model, grit=grit), [16, 8])
    kind = sentence_transformers.SentenceTransformerTrainingArguments
    given = arguments(
        tmp_path, kind, max_steps=-1, num_train_epochs=2, batch_sampler=grit.batch_sampler
    )
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model, given, data, loss=loss, callbacks=[grit]
    )
    trainer.train()
    assert trainer.state.global_step == 18 and grit.schedule.plan.grouped
    another = sentence_transformers.SentenceTransformerTrainer(model, given, data, loss=loss)
    with pytest.raises(ValueError, match=r"and callbacks=\[grit\]"):
        another.train()


# Numbers of rows

CHANGES = {
    "shuffled": lambda data: data.shuffle(seed=0),
    "sorted": lambda data: data.sort("anchor"),
    "filtered": lambda data: data.filter(lambda row: row["anchor"] > "g"),
    "split": lambda data: data.train_test_split(0.25, seed=0)["train"],
    "joined": lambda data: concatenate_datasets([pairs(20, seed=2), data]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_rows_are_found_after_a_data_set_was_changed(change):
    data = pairs()
    other = CHANGES[change](data)
    rows = Rows(data)
    numbers = torch.tensor(other["label"])
    for number, row in zip(rows.places(numbers).tolist(), other, strict=True):
        known = row["anchor"] in data["anchor"]
        assert (number >= 0) == known and (not known or data[number] == row)
    assert rows.known(numbers) == (change != "joined")


def test_equal_rows_have_different_numbers():
    data = numbered(Dataset.from_dict({"a": ["x", "x", "y"], "b": ["z", "z", "z"]}))
    assert len(set(data["label"])) == 3 and not Rows(data).repeated


@pytest.mark.parametrize(
    "given, why",
    [
        (lambda: DatasetDict(train=unnumbered()), "got DatasetDict, expected one datasets.Dataset"),
        (lambda: unnumbered().to_iterable_dataset(), "got IterableDataset|streamed"),
        (lambda: [{"anchor": "a", "positive": "b"}], "got list, expected one"),
        (lambda: unnumbered().select([]), "got 0 rows"),
        (lambda: unnumbered().select_columns(["anchor"]), r"columns \['anchor'\], expected"),
        (lambda: pairs(), "has a column 'label' already"),
    ],
)
def test_what_cannot_be_numbered_is_refused(given, why):
    with pytest.raises(ValueError, match=why):
        numbered(given())


def test_rows_that_were_not_numbered_before_they_were_joined_are_refused():
    joined = concatenate_datasets([pairs(), unnumbered()])
    with pytest.raises(ValueError, match=f"{len(unnumbered())} rows have no number"):
        Rows(joined)


def unnumbered():
    return pairs().remove_columns("label")


# transformers' Trainer


def trainer_of(
    folder, name, evaluation=True, judge=None, grouped=False, more=None, change=None, **changes
):
    torch.manual_seed(0)
    model = MODELS[name]()
    model = model if change is None else change(model)
    ids = torch.randint(2, 50, (24, 6))
    ids[:, -1] = 1
    rows = {"pixel_values": torch.randn(24, 3, 16, 16), "input_ids": ids}
    data = numbered(Dataset.from_dict(rows)).with_format("torch")
    return MinedTrainer(
        model,
        arguments(folder, TrainingArguments, **changes),
        train_dataset=data,
        eval_dataset=data.select(range(8)) if evaluation else None,
        grit=Grit(data, GROUPED) if grouped else None,
        judge=judge,
        **(more or {}),
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_an_update_is_the_mean_of_its_mini_batches(tmp_path, name, steps):
    """With gradient accumulation; and the logged loss does not grow with it."""
    trainer = trainer_of(
        tmp_path, name, learning_rate=0.0, gradient_accumulation_steps=steps, max_steps=1
    )
    seen, watch = [], Gradients()
    loss_of = trainer.compute_loss

    def recording(model, inputs, *args, **rest):
        seen.append({key: value for key, value in inputs.items() if key != "labels"})
        return loss_of(model, inputs, *args, **rest)

    trainer.compute_loss = recording
    trainer.add_callback(watch)
    trainer.train()
    model, losses = trainer.model, []
    model.zero_grad()
    for inputs in seen[:steps]:
        loss = model(**inputs, return_loss=True).loss / steps
        loss.backward()
        losses.append(loss.item())
    assert watch.norms[0] == pytest.approx(norm_of(model), rel=1e-4)
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert float(logged[0]) == pytest.approx(sum(losses), rel=1e-2)


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_before_during_and_after_training(tmp_path, name):
    trainer = trainer_of(tmp_path, name, eval_strategy="steps", eval_steps=1, grouped=True)
    before = trainer.evaluate()["eval_loss"]
    batch = trainer.data_collator([trainer.eval_dataset[row] for row in range(8)])
    batch.pop("labels")
    with torch.no_grad():
        assert before == pytest.approx(trainer.model(**batch, return_loss=True).loss.item(), 1e-3)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] != before
    assert sum("eval_loss" in row for row in trainer.state.log_history) == 3
    assert trainer.predict(trainer.eval_dataset).predictions[0].shape == (8, 16)


@pytest.mark.parametrize(
    "changes",
    [
        {"bf16": True},
        {"fp16": True},
        {"dataloader_num_workers": 1},
        {"dataloader_drop_last": True},
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_transformers_trains_with(tmp_path, changes):
    trainer = trainer_of(tmp_path, "CLIP", grouped=True, max_steps=8, **changes)
    assert trainer.train().training_loss > 0 and trainer.state.global_step == 8


def test_metrics_get_embeddings_and_the_log_has_counts(tmp_path):
    """The log of TensorBoard, too; and what would be ignored is refused."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = []

    def metrics(found):
        seen.append(found)
        return {"rows": len(found.label_ids)}

    events = str(tmp_path / "events")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", events)
        trainer = trainer_of(
            tmp_path,
            "CLIP",
            report_to="tensorboard",
            eval_strategy="epoch",
            more={"compute_metrics": metrics, "margin": 0.0},
        )
        trainer.train()
    assert trainer.evaluate()["eval_rows"] == 8
    assert seen[0].predictions[0].shape == (8, 16)
    assert seen[0].label_ids.tolist() == [int(one) for one in trainer.eval_dataset["label"]]
    written = EventAccumulator(events).Reload()
    assert [one.value for one in written.Scalars("train/judged_negatives")] == [24.0, 24.0]
    with pytest.raises(ValueError, match="without compute_loss_func and label_smoothing_factor"):
        trainer_of(tmp_path, "CLIP", label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="without compute_loss_func and label_smoothing_factor"):
        trainer_of(tmp_path, "CLIP", more={"compute_loss_func": metrics})
    with pytest.raises(ValueError, match="got grit and train_sampling_strategy='sequential'"):
        trainer_of(tmp_path, "CLIP", grouped=True, train_sampling_strategy="sequential")
    with pytest.raises(TypeError, match="'callback'; did you mean callbacks"):
        trainer_of(tmp_path, "CLIP", more={"callback": []})


def test_evaluation_rows_are_not_judged_as_rows_of_training(tmp_path):
    class Refuses(PairJudge):
        def __init__(self, rows):
            self.rows = rows

        def judge(self, *args, **rest):
            raise AssertionError("judged")

    trainer = trainer_of(tmp_path, "CLIP", judge=Refuses(_Nothing()))
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(AssertionError, match="judged"):
        trainer.train()


class _Nothing:
    def known(self, numbers):
        return False


@pytest.mark.parametrize("name", MODELS)
def test_lora_trains_in_the_trainer(tmp_path, name):
    """Only its own weights change."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    change = partial(peft.get_peft_model, peft_config=lora)
    trainer = trainer_of(tmp_path, name, grouped=True, change=change, max_steps=8)
    before = {key: one.clone() for key, one in trainer.model.named_parameters()}
    trainer.train()
    now = dict(trainer.model.named_parameters())
    changed = [key for key in now if not torch.equal(now[key], before[key])]
    assert changed and all("lora" in key for key in changed)


def test_lora_trains_in_sentence_transformers(tmp_path):
    peft = pytest.importorskip("peft")
    model = encoder(tmp_path)
    model.add_adapter(peft.LoraConfig("FEATURE_EXTRACTION", target_modules=["query"], r=2))
    before = {key: one.clone() for key, one in model.named_parameters()}
    trainer = train(tmp_path, model=model)
    changed = [key for key, one in model.named_parameters() if not torch.equal(one, before[key])]
    assert changed and all("lora" in key for key in changed)
    assert trainer.loss.output.counts[:, 1].sum() > 0


def test_grit_of_other_rows_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, "CLIP")
    trainer.grit = Grit(pairs(), GROUPED)
    with pytest.raises(ValueError, match="Grit has other rows than train_dataset"):
        trainer.get_train_dataloader()


def test_a_transform_is_for_the_model_alone(tmp_path):
    """Rows are numbered, read and judged as they are stored."""

    def transform(rows):
        return {**rows, "anchor": [f"{one}!" for one in rows["anchor"]]}

    stored = pairs().remove_columns("label").select([2, 0])
    data = numbered(stored.with_transform(transform))
    assert list(data["anchor"]) == [f"{one}!" for one in stored["anchor"]]
    assert data.with_format(None)["label"][:] == numbered(stored)["label"][:]
    judge, both = PairJudge(cross_encoder(tmp_path), data), torch.arange(2)
    plain = PairJudge(judge.encoder, numbered(stored))
    samples = {"loaded_index": torch.tensor(numbered(stored)["label"])}
    assert torch.equal(*(one.judge(samples, both, both) for one in (judge, plain)))


def test_a_users_classes_are_not_numbers_of_rows(tmp_path):
    data = pairs().remove_columns("label")
    data = data.add_column("label", [n % 2 for n in range(len(data))])
    with pytest.raises(ValueError, match="numbers of your own"):
        PairJudge(cross_encoder(tmp_path), data)


def test_a_schedule_of_places_gives_a_judge_the_numbers_of_its_rows():
    read, schedule = [], GritSchedule(36, batch_size=4)

    class Reading(torch.nn.Linear):
        num_labels = 1

        def predict(self, judged, **_):
            read.extend(judged)
            return torch.zeros(len(judged))

    data = pairs()
    loss = PairLoss(judge=PairJudge(Reading(1, 1), data), grit=schedule)
    rows = torch.from_numpy(schedule.begin(0).mini_batches(0)[0])
    sides = tuple(F.normalize(torch.randn(2, 4, 3), dim=-1))
    loss.itc(sides, 10.0, {"loaded_index": rows}, True)
    chosen = data[rows.tolist()]
    assert read and {text for pair in read for text in pair} <= {
        *chosen["anchor"],
        *chosen["positive"],
    }


def test_gradients_of_the_loss_do_not_add_up_over_updates(tmp_path):
    more, given = {"itc_loss": "sigmoid"}, {"learning_rate": 0.0, "max_steps": 3}
    trainer = trainer_of(tmp_path, "CLIP", more=more, **given)
    bias, own, held = trainer.mined_loss.parts.form.relative_bias, [], []
    bias.register_hook(lambda grad: own.append(grad.item()))

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **rest):
            held.append(bias.grad.item())

    trainer.add_callback(Watch())
    trainer.train()
    assert len(held) == 3 and held == pytest.approx(own)
