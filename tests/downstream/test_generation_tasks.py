"""Captioning and VQA on LAVIS's own data sets, with a model that only names colours."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from generation_run import COLOURS, Speaker
from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from omegaconf import OmegaConf
from PIL import Image
from runs import finish, launcher, records, spawn
from test_caption_metrics import coco_file
from torch.utils.data import DataLoader
from vqa_rows import QUESTIONS, vqa_files

from lavis_mafa.downstream import MafaCaptionTask, MafaGQATask, MafaVQATask
from lavis_mafa.training.session import run

SCRIPT = Path(__file__).with_name("generation_run.py")
NAMES = list(COLOURS)
CAPTION_RUN = {"num_beams": 5, "max_len": 30, "min_len": 8, "evaluate": True, "metrics": ["cider"]}


@pytest.fixture(autouse=True)
def result_dir(tmp_path, monkeypatch):
    monkeypatch.setitem(registry.mapping["paths"], "result_dir", str(tmp_path / "result"))
    return tmp_path / "result"


@pytest.fixture(autouse=True)
def no_java(monkeypatch):
    """Java is slow to start; its use is tested elsewhere."""
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def pictures(tmp_path):
    names = [f"COCO_val2014_{number + 7:012d}.jpg" for number in range(len(NAMES))]
    for path, name in zip(names, NAMES, strict=True):
        Image.new("RGB", (8, 8), COLOURS[name]).save(tmp_path / path)
    return names


def settings(folder, name, files, kind="default"):
    """Return a data set's config with local annotation files; ``files``: {split: contents}."""
    builder = registry.get_builder_class(name)
    cfg = load_dataset_config(builder.default_config_path(kind))
    annotations = {}
    for split, contents in files.items():
        paths = []
        for number, content in enumerate(contents):
            path = folder / f"{name}_{split}_{number}.json"
            path.write_text(json.dumps(content))
            paths.append(str(path))
        annotations[split] = {"url": paths, "storage": paths}
    text = {"coco_caption": "blip_caption", "nocaps": "blip_caption"}.get(name, "blip_question")
    changed = OmegaConf.to_container(cfg)
    changed["build_info"] = {"annotations": annotations, "images": {"storage": str(folder)}}
    changed["vis_processor"] = {"eval": {"name": "blip_image_eval", "image_size": 8}}
    changed["text_processor"] = {"eval": {"name": text}}
    return changed


def set_up_task(kind, run, folder=None, **datasets):
    """Return the task of a run config, and its data sets by builder."""
    configs = {name: settings(folder, name, files) for name, files in datasets.items()}
    cfg = SimpleNamespace(run_cfg=OmegaConf.create(run), datasets_cfg=OmegaConf.create(configs))
    task = kind.setup_task(cfg)
    return task, task.build_datasets(cfg) if datasets else {}


def evaluate(task, dataset, split="val", model=None, batch_size=3):
    """Evaluate as the runner does."""
    model = model or Speaker()
    task.before_evaluation(model=model, dataset=dataset)
    collate = getattr(dataset, "collater", None)
    loader = DataLoader(dataset, batch_size=batch_size, collate_fn=collate)
    records = task.evaluation(model, loader, cuda_enabled=False)
    return task.after_evaluation(val_result=records, split_name=split, epoch=2)


def score(kind, run, folder, name, files, split="val", model=None):
    """Evaluate a new task on one data set with the given files."""
    task, data = set_up_task(kind, run, folder, **{name: files})
    return evaluate(task, data[name][split], split, model)


def read_only_result(result_dir, name):
    assert [path.name for path in result_dir.iterdir()] == [name]
    return json.loads((result_dir / name).read_text())


# Captions

TRUE = [[f"a picture that is {name}", f"all of it is {name}"] for name in NAMES]


def caption_rows(pictures, captions=TRUE):
    rows = [{"image": picture, "image_id": picture} for picture in pictures]
    if captions is None:
        return rows
    return [{**row, "caption": several} for row, several in zip(rows, captions, strict=True)]


def coco_truth(path, ids, captions=TRUE, domains=None):
    domains = dict(zip(ids, domains, strict=True)) if domains else None
    return str(coco_file(path, dict(zip(ids, captions, strict=True)), domains))


def test_captions_of_the_data_set_need_no_annotation_file(tmp_path, pictures, result_dir):
    files = {"val": [caption_rows(pictures)]}
    model = Speaker()
    scores = score(MafaCaptionTask, CAPTION_RUN, tmp_path, "coco_caption", files, model=model)
    assert set(scores) == {"CIDEr", "agg_metrics", "tokenizer"}
    assert scores["CIDEr"] == scores["agg_metrics"] > 1
    assert read_only_result(result_dir, "val_epoch2.json") == [
        {"image_id": number + 7, "caption": f"a picture that is {name}"}
        for number, name in enumerate(NAMES)
    ]
    given = {"num_beams": 5, "max_length": 30, "min_length": 8, "prompt": None}
    assert model.calls[0].items() >= {**given, "use_nucleus_sampling": False}.items()


def test_rows_with_one_caption_each_are_merged_by_image(tmp_path, pictures, result_dir):
    rows = [
        {"image": picture, "caption": text}
        for picture, merged in zip(pictures, TRUE, strict=True)
        for text in merged
    ]
    given = (MafaCaptionTask, CAPTION_RUN, tmp_path, "coco_caption")
    merged = score(*given, {"val": [rows]})
    assert len(read_only_result(result_dir, "val_epoch2.json")) == 4
    assert merged == score(*given, {"val": [caption_rows(pictures)]})


def test_annotation_file_of_a_split_takes_precedence(tmp_path, pictures):
    wrong = [["something else"]] * 4
    files = {split: [caption_rows(pictures, wrong)] for split in ("val", "test")}
    path = coco_truth(tmp_path / "gt.json", range(7, 11))
    run = {**CAPTION_RUN, "annotation_file": {"test": path, "train": None}}
    given = (MafaCaptionTask, run, tmp_path, "coco_caption", files)
    assert score(*given)["CIDEr"] == 0
    assert score(*given, "test")["CIDEr"] > 1
    run["annotation_file"] = {"coco_caption.val": path}
    assert score(*given)["CIDEr"] > 1


def test_nocaps_scores_by_domain(tmp_path, pictures, result_dir):
    rows = [{"image": p, "img_id": 30 + n} for n, p in enumerate(pictures)]
    domains = ["in-domain", "out-domain", "in-domain", "out-domain"]
    captions = [["a picture that is red"], ["a green wall"], ["it is blue"], ["that is white"]]
    path = coco_truth(tmp_path / "gt.json", range(30, 34), captions, domains)
    run = {**CAPTION_RUN, "annotation_file": path}
    scores = score(MafaCaptionTask, run, tmp_path, "nocaps", {"val": [rows]})
    assert set(scores) == {"CIDEr", "CIDEr_in", "CIDEr_out", "agg_metrics", "tokenizer"}
    written = read_only_result(result_dir, "val_epoch2.json")
    assert [row["image_id"] for row in written] == [30, 31, 32, 33]
    assert scores["agg_metrics"] == scores["CIDEr"] != scores["CIDEr_in"] > 0

    rows_with_references = [
        {**row, "caption": several, "domain": domain}
        for row, several, domain in zip(rows, captions, domains, strict=True)
    ]
    files = {"val": [rows_with_references]}
    assert score(MafaCaptionTask, CAPTION_RUN, tmp_path, "nocaps", files) == scores


class LikeRetrieval(torch.utils.data.Dataset):
    """The interface of retrieval sets: ``index`` and texts by image."""

    text = [text for several in TRUE for text in several]
    img2txt = {n: [2 * n, 2 * n + 1] for n in range(4)}

    def __len__(self):
        return 4

    def __getitem__(self, index):
        pixels = torch.tensor(COLOURS[NAMES[index]]).view(3, 1, 1).expand(3, 8, 8) / 255.0
        return {"image": pixels, "index": index}


class ById(LikeRetrieval):
    def __getitem__(self, index):
        return {"image": super().__getitem__(index)["image"], "image_id": f"{index:05d}"}


def test_samples_without_the_number_of_their_row_are_rejected_before_generation():
    data, model = ById(), Speaker()
    data.annotation = [{"caption": several} for several in TRUE]
    task, _ = set_up_task(MafaCaptionTask, CAPTION_RUN)
    with pytest.raises(ValueError, match="samples have neither instance_id nor index"):
        evaluate(task, data, model=model)
    assert not model.calls


@pytest.mark.parametrize("kind", [LikeRetrieval, ById])
def test_references_of_other_data_sets(kind, result_dir):
    task, _ = set_up_task(MafaCaptionTask, CAPTION_RUN)
    figures = evaluate(task, kind())
    assert figures["CIDEr"] > 1
    assert [r["image_id"] for r in read_only_result(result_dir, "val_epoch2.json")] == [0, 1, 2, 3]


def test_missing_references_are_an_error_before_generation(tmp_path, pictures, result_dir):
    rows = [{"image": p, "img_id": n} for n, p in enumerate(pictures)]
    run = dict(CAPTION_RUN)
    task, data = set_up_task(MafaCaptionTask, run, tmp_path, nocaps={"test": [rows]})
    model = Speaker()
    with pytest.raises(ValueError, match=r"score test of nocaps .*run\.annotation_file.*False"):
        evaluate(task, data["nocaps"]["test"], "test", model)
    run["annotation_file"] = str(tmp_path / "none.json")
    task, _ = set_up_task(MafaCaptionTask, run)
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        evaluate(task, data["nocaps"]["test"], "test", model)
    assert not model.calls and not result_dir.exists()

    run["report_metric"] = False
    task, _ = set_up_task(MafaCaptionTask, run)
    assert evaluate(task, data["nocaps"]["test"], "test", model) == {}
    assert len(read_only_result(result_dir, "test_epoch2.json")) == 4


def test_only_karpathy_split_is_downloaded(tmp_path, pictures, monkeypatch):
    from lavis_mafa.downstream import mafa_captioning

    requests = []

    def no_network(url, folder):
        requests.append(url)
        raise OSError("no route to host")

    monkeypatch.setattr(mafa_captioning, "download_url", no_network)
    monkeypatch.setitem(registry.mapping["paths"], "cache_root", str(tmp_path))
    files = {"test": [caption_rows(pictures, None)]}
    given = (MafaCaptionTask, CAPTION_RUN, tmp_path, "coco_caption", files, "test")
    with pytest.raises(OSError, match="no route to host"):
        score(*given)
    assert requests == [mafa_captioning.KARPATHY.format("test")]
    (tmp_path / "coco_gt").mkdir()
    coco_truth(tmp_path / "coco_gt/coco_karpathy_test_gt.json", range(7, 11))
    assert score(*given)["CIDEr"] > 1
    assert len(requests) == 1


def test_captions_of_other_images_are_rejected_before_generation(tmp_path, pictures):
    path = coco_truth(tmp_path / "gt.json", range(100, 104))
    files = {"val": [caption_rows(pictures)]}
    run = {**CAPTION_RUN, "annotation_file": path}
    model = Speaker()
    with pytest.raises(ValueError, match=r"gt\.json has none of 4 .*, such as 7, 8, 9: give"):
        score(MafaCaptionTask, run, tmp_path, "coco_caption", files, model=model)
    assert not model.calls


def test_two_images_with_the_same_id_are_rejected(tmp_path):
    for folder, name in (("a", "red"), ("b", "blue")):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (8, 8), COLOURS[name]).save(tmp_path / folder / "1.png")
    rows = [{"image": f"{folder}/1.png", "caption": ["x"]} for folder in "ab"]
    with pytest.raises(ValueError, match=r"a/1\.png and b/1\.png have the same image id"):
        score(MafaCaptionTask, CAPTION_RUN, tmp_path, "coco_caption", {"val": [rows]})


def test_generation_options_reach_the_model():
    run = {**CAPTION_RUN, "length_penalty": -1.0, "repetition_penalty": 1.5, "prompt": "a photo of"}
    task, _ = set_up_task(MafaCaptionTask, run)
    model = Speaker()
    evaluate(task, LikeRetrieval(), model=model)
    call = model.calls[0]
    assert (call["length_penalty"], call["repetition_penalty"]) == (-1.0, 1.5)
    assert (call["prompt"], call["use_nucleus_sampling"]) == ("a photo of", False)
    task, _ = set_up_task(MafaCaptionTask, {**CAPTION_RUN, "top_p": 0.3})
    evaluate(task, LikeRetrieval(), model=model)
    assert (model.calls[-1]["top_p"], model.calls[-1]["use_nucleus_sampling"]) == (0.3, True)


class LikeBlip(Speaker):
    """A model without length penalty and with its own prompt."""

    reads_prompt = False

    def generate(self, samples, use_nucleus_sampling, num_beams, max_length, min_length):
        return super().generate(samples)

    def predict_answers(self, samples, **kwargs):
        return super().predict_answers(samples, **kwargs)


def test_option_that_the_model_does_not_support_is_rejected():
    for kind, key in ((MafaCaptionTask, "repetition_penalty"), (MafaVQATask, "length_penalty")):
        run = {**CAPTION_RUN, "inference_method": "generate", key: 0.5}
        task, _ = set_up_task(kind, run)
        model = LikeBlip()
        with pytest.raises(ValueError, match=rf"run\.{key} is set, but LikeBlip\.\w+\(\) does not"):
            evaluate(task, LikeRetrieval(), model=model)
        assert not model.calls


def test_samples_without_ids_are_rejected():
    task, _ = set_up_task(MafaCaptionTask, CAPTION_RUN)
    with pytest.raises(ValueError, match="needs image_id or index in a sample; it has image"):
        task.valid_step(Speaker(), {"image": torch.ones(2, 3, 8, 8)})


# Answers

VQA_RUN = {
    "num_beams": 5,
    "max_len": 10,
    "min_len": 1,
    "evaluate": True,
    "inference_method": "generate",
    "prompt": "Question: {} Answer:",
    "length_penalty": -1.0,
}


@pytest.mark.parametrize(("builder", "split"), [("coco_vqa", "val"), ("ok_vqa", "test")])
def test_vqa_accuracy_by_annotators(tmp_path, pictures, result_dir, builder, split):
    files = {split: vqa_files(pictures)}
    task, data = set_up_task(MafaVQATask, VQA_RUN, tmp_path, **{builder: files})
    model = Speaker()
    scores = evaluate(task, data[builder][split], split, model)
    # 10 of 10; 0 of 10; 3 of 10: (7 * 1 + 3 * 2/3) / 10; 1 of 10: (9 * 1/3 + 1 * 0) / 10.
    assert scores == {"agg_metrics": 55.0, "acc": 55.0, "other": 73.33, "yes/no": 0.0}
    assert read_only_result(result_dir, f"{split}_vqa_result.json")[0] == {
        "question_id": 21,
        "answer": "The red.",
    }
    call, given = model.calls[0], {**VQA_RUN, "answer_list": NAMES, "kwargs": {}}
    assert all(call[key] == given[key] for key in given.keys() - {"evaluate"})
    # A second validation reads the annotations again.
    assert evaluate(task, data[builder][split], split) == scores


def test_vqa_on_a_subset_of_the_questions(tmp_path, pictures, caplog):
    rows, *others = vqa_files(pictures)
    given = (MafaVQATask, VQA_RUN, tmp_path, "coco_vqa")
    assert score(*given, {"val": (rows[:1], *others)})["acc"] == 100.0
    counts = "scored on 1 questions: 0 answers have no annotation, 3 annotations no answer"
    assert counts in caplog.text
    rows = [{**row, "question_id": row["question_id"] + 100} for row in rows]
    with pytest.raises(ValueError, match=r"val_3\.json has none of 4 .*, such as 121, 122"):
        score(*given, {"val": (rows, *others)})


@pytest.mark.parametrize("name", ["coco_vqa", "gqa"])
def test_without_truth_answers_are_written_and_not_scored(
    tmp_path, pictures, result_dir, caplog, name
):
    rows, names, *_ = vqa_files(pictures)
    blank = [{"answers": []}, {"answer": ""}, {"answers": ["", " "]}, {"answer": [None]}]
    rows = [{**row, **answers} for row, answers in zip(rows, blank, strict=True)]
    files = [rows, names] if name == "coco_vqa" else [gqa_rows(pictures, blank)]
    kind = MafaVQATask if name == "coco_vqa" else MafaGQATask
    assert score(kind, VQA_RUN, tmp_path, name, {"test": files}, "test") == {}
    assert "no right answers are known for test: nothing is scored" in caplog.text
    written = read_only_result(result_dir, "test_vqa_result.json")
    if name == "coco_vqa":
        assert [row["question_id"] for row in written] == [21, 22, 23, 24]
    else:
        assert [row["gt_ans"] for row in written] == [None] * 4


def test_vqa_files_of_another_format_are_rejected(tmp_path, pictures):
    rows, names, questions, _ = vqa_files(pictures)
    files, model = {"val": (rows, names, questions, [])}, Speaker()
    with pytest.raises(ValueError, match=r"val_2\.json and .*val_3\.json are not in the"):
        score(MafaVQATask, VQA_RUN, tmp_path, "coco_vqa", files, model=model)
    assert not model.calls


@pytest.mark.parametrize("key", ["answers", "answer"])
def test_answers_in_the_annotations(tmp_path, pictures, key):
    rows, names, *_ = vqa_files(pictures)
    # One answer; a wrong one; two of three annotators; five of five.
    answers_of_rows = [["Red"], ["no"], ["blue", "the blue", "sky"], ["white"] * 5]
    rows = [
        {**row, key: answers, "answer_type": kind}
        for row, answers, (_, _, kind) in zip(rows, answers_of_rows, QUESTIONS, strict=True)
    ]
    figures = score(MafaVQATask, VQA_RUN, tmp_path, "coco_vqa", {"val": (rows, names)})
    acc, other = 100 * (1 + 0 + 2 / 3 + 1) / 4, 100 * (1 + 2 / 3 + 1) / 3
    expected = {"acc": acc, "agg_metrics": acc, "other": other, "yes/no": 0}
    assert figures == pytest.approx(expected, abs=5e-3)
    rows[2][key], model = [["red"]], Speaker()
    with pytest.raises(ValueError, match=r"the annotation of \w+ .*\s+row 2: expected a text"):
        score(MafaVQATask, VQA_RUN, tmp_path, "coco_vqa", {"val": (rows, names)}, model=model)
    assert not model.calls


def test_ranking_needs_candidates():
    task, _ = set_up_task(MafaVQATask, {**VQA_RUN, "inference_method": "rank"})
    with pytest.raises(ValueError, match="inference_method is rank, but LikeRetrieval has no list"):
        evaluate(task, LikeRetrieval())


def gqa_rows(pictures, answers):
    return [
        {"image": p, "question": "which?", "question_id": f"0{n}07", **a}
        for n, (p, a) in enumerate(zip(pictures, answers, strict=True))
    ]


def test_gqa_accuracy_by_exact_match(tmp_path, pictures, result_dir):
    rows = gqa_rows(pictures, [{"answer": a} for a in ("red", "Green", "blue", "grey")])
    rows[2]["answers"] = [rows[2].pop("answer")]
    # Only generated answers are normalised, as in LAVIS: "Green" keeps its capital.
    figures = score(MafaGQATask, VQA_RUN, tmp_path, "gqa", {"val": [rows]})
    assert figures == {"acc": 50.0, "agg_metrics": 50.0}
    assert read_only_result(result_dir, "val_vqa_result.json")[1] == {
        "question_id": "0107",
        "pred_ans": "The green.",
        "gt_ans": "Green",
    }


def test_gqa_rejects_several_answers_per_question(tmp_path, pictures):
    rows = gqa_rows(pictures, [{"answers": ["red", "blue"]}] * 4)
    with pytest.raises(ValueError, match=r"GQA has one answer a question, got .*use task mafa_vqa"):
        score(MafaGQATask, VQA_RUN, tmp_path, "gqa", {"val": [rows]})


# End to end


def write_config(folder, task, name, files, **run):
    dataset = settings(folder, name, files)
    config = {
        "model": {"arch": "test_speaker", "model_type": "tiny"},
        "datasets": {name: dataset},
        "run": {
            "task": task,
            "runner": "runner_mafa",
            "batch_size_train": 1,
            "batch_size_eval": 2,
            "num_workers": 0,
            "device": "cpu",
            "test_splits": ["test"],
            "loggers": [],
            "job_id": "job",
            **CAPTION_RUN,
            **run,
        },
    }
    path = folder / f"{task}.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.mark.slow
def test_two_ranks_write_and_score_the_same_as_one(tmp_path, pictures):
    # Five images on two ranks: the sampler pads one share with an image of the other one.
    extra = tmp_path / "COCO_val2014_000000000055.jpg"
    Image.new("RGB", (8, 8), COLOURS["blue"]).save(extra)
    rows = caption_rows([*pictures, extra.name], [*TRUE, ["the blue"]])
    files = {"train": [rows[:1]], "val": [rows[:1]], "test": [rows]}
    config = write_config(tmp_path, "mafa_captioning", "coco_caption", files)
    arguments = [SCRIPT, "--cfg-path", config, "--options", f"run.output_dir={tmp_path / 'two'}"]
    command = [*launcher(2), *arguments]
    finish(spawn(tmp_path, command, fresh=True, TRY_TOGETHER=str(tmp_path)))
    run(config, [f"run.output_dir={tmp_path / 'one'}", "run.evaluate=True"])
    written, figures = [], []
    for name in ("one", "two"):
        written.append((tmp_path / name / "job/result/test_epochgiven.json").read_text())
        (record,) = records(tmp_path / name, "eval")
        figures.append({key: value for key, value in record.items() if key != "time"})
    assert written[0] == written[1]
    assert [record["image_id"] for record in json.loads(written[0])] == [7, 8, 9, 10, 55]
    assert figures[0] == figures[1]
    assert figures[0]["CIDEr"] > 1 and figures[0]["tokenizer"] == "python"

    first, second = (json.loads((tmp_path / f"rank{r}.json").read_text()) for r in (0, 1))
    order = [[0, 0], [1, 0], [0, 1], [0, 2]]
    assert first["gathered"] == [{"id": i} for i in order] and second["gathered"] is None
    assert (first["value"], second["value"]) == ("made on 0", None)
    assert first["error"] == "ValueError: wrong on 0"
    assert second["error"] == "MainProcessError: on rank 0: ValueError: wrong on 0"
