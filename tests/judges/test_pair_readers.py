"""Con-D as a vision-language model with a Yes/No answer, and as a cross-encoder."""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, toy_config
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small_vlm import WORDS, save_vlm
from two_forks import answers_of_a_group

from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.data import TrainingSet
from lavis_mafa.judges import cross_encoder
from lavis_mafa.judges.build import build_discriminator
from lavis_mafa.judges.pair_reader import _picture_of, _WholePicture
from lavis_mafa.judges.yes_no import _YesNo
from lavis_mafa.settings.load import check_con_d
from lavis_mafa.tools.corpus_features import Features
from lavis_mafa.tools.engine import _judge_by_image
from lavis_mafa.tools.model_and_data import _build_judge, _ModelAndData
from lavis_mafa.toyworld import ToyScenesBuilder

sys.path.append(str(ROOT / "tests" / "training"))
from runs import records, run_here  # noqa: E402

pytest.importorskip("transformers", minversion="4.46")
QUESTION = 'Does the caption "{caption}" of the image ?'
VIEW = {
    f"datasets__toy_scenes__vis_processor__train__{key}": value
    for key, value in {"name": "blip_image_eval", "image_size": 32}.items()
}


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    return save_vlm(tmp_path_factory.mktemp("vlm"))


def config(path, arch="yes_no", **more):
    given = {"yes_no": {"question": QUESTION}, **more} if arch == "yes_no" else more
    found, problems = check_con_d({"arch": arch, "checkpoint": path, **given})
    assert problems == []
    return found


def one_by_one(path, pairs, question=QUESTION):
    """Return P(Yes) of each pair, by transformers' own classes: one pair a pass, no padding."""
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    from lavis_mafa.judges.yes_no import _without_old_timm

    with _without_old_timm():
        model = LlavaForConditionalGeneration.from_pretrained(path).eval()
        reader = AutoProcessor.from_pretrained(path)
    found = []
    for picture, caption in pairs:
        text = f"<image> {question.replace('{caption}', caption)} ASSISTANT :"
        inputs = reader(text=text, images=picture, return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1]
        yes, no = logits[WORDS.index("Yes")], logits[WORDS.index("No")]
        found.append(float(1 / (1 + torch.exp(no - yes))))
    return found


def samples_of(con_d, pictures, captions):
    """Return a mini-batch as `TrainingSet` collates it."""
    return {
        "image": torch.stack([con_d.processor(one) for one in pictures]),
        "text_input": captions,
    }


def pairs_of(pictures, captions, image_of, text_of):
    return [(pictures[i], captions[t]) for i, t in zip(image_of, text_of, strict=True)]


def drawn_pictures(count, seed=0):
    generator = np.random.default_rng(seed)
    sizes = generator.integers(20, 90, (count, 2))
    return [
        Image.fromarray(generator.integers(0, 256, (height, width, 3)).astype(np.uint8))
        for width, height in sizes
    ]


# Pictures


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.integers(0, 9))
@settings(max_examples=50)
def test_picture_comes_back_with_its_proportions(width, height, longest, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    back = _picture_of(_WholePicture(longest)(Image.fromarray(pixels)))
    if max(width, height) <= longest:
        assert np.array_equal(np.asarray(back), pixels)
    else:
        scale = longest / max(width, height)
        assert max(back.size) == longest
        assert back.size == tuple(max(1, round(side * scale)) for side in (width, height))


# Yes or No


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_yes_no_equals_the_loop_over_pairs(vlm, batch_size):
    """Captions of different lengths are padded, pictures of different sizes are not cut."""
    con_d = build_discriminator(
        config(vlm, yes_no={"question": QUESTION, "batch_size": batch_size}, image_size=96)
    )
    pictures = drawn_pictures(4)
    captions = ["a red circle", "blue", "the small {question} and a large green square", "?"]
    samples = samples_of(con_d, pictures, captions)
    image_of, text_of = torch.tensor([0, 1, 2, 3, 0, 3]), torch.tensor([0, 1, 2, 3, 2, 0])
    found = con_d.judge(samples, image_of, text_of)
    pairs = pairs_of(pictures, captions, image_of, text_of)
    assert found.tolist() == pytest.approx(one_by_one(vlm, pairs), abs=1e-5)
    assert found.std() > 0.01  # pictures and captions matter
    assert con_d.judge(samples, image_of[:0], text_of[:0]).shape == (0,)
    assert not found.requires_grad and not found.is_inference()


def test_own_prompt_replaces_the_chat_template(tmp_path):
    path = save_vlm(tmp_path, template=None)
    own = {"question": QUESTION, "prompt": "<image> {question} ASSISTANT :"}
    con_d = build_discriminator(config(path, yes_no=own))
    (picture,) = drawn_pictures(1)
    samples = samples_of(con_d, [picture], ["a red circle"])
    zero = torch.zeros(1, dtype=torch.long)
    expected = one_by_one(path, [(picture, "a red circle")])
    assert con_d.judge(samples, zero, zero).tolist() == pytest.approx(expected, abs=1e-5)


# Several ranks


def judge_on_rank(rank, path):
    """Judge all pairs of both ranks' candidates, and compare with a loop over the pairs."""
    con_d = build_discriminator(config(path))
    pictures, captions = drawn_pictures(4), ["a red circle", "blue", "a green square", "left of"]
    own = slice(2 * rank, 2 * rank + 2)
    samples = samples_of(con_d, pictures[own], captions[own])
    numbers = torch.arange(4)
    image_of, text_of = torch.cartesian_prod(numbers, numbers).unbind(1)
    found = con_d.judge(samples, image_of, text_of, Ranks(together=True))
    none = con_d.judge(samples, image_of[:0], text_of[:0], Ranks(together=True))
    pairs = pairs_of(pictures, captions, image_of, text_of)
    difference = (found - torch.tensor(one_by_one(path, pairs))).abs().max().item()
    return difference < 1e-5, len(none)


def test_candidates_of_two_ranks(tmp_path, vlm):
    assert answers_of_a_group(judge_on_rank, tmp_path, vlm) == [(0, True, 0), (1, True, 0)]


# Analyses


def test_analyses_judge_as_one_by_one(vlm):
    """As in `lavis-mafa count` and `mine`."""
    data = ToyScenesBuilder(toy_config(train_size=12)).build_datasets()["train"]
    data.vis_processor = lambda picture: picture
    data = TrainingSet(data, seed=0)
    captions = [data.source(number)[1] for number in range(12)]
    vectors = torch.nn.functional.normalize(torch.randn(12, 4), dim=1)
    features = Features(np.arange(12), vectors, vectors, vectors, captions, [])
    opened = _ModelAndData(None, None, data, torch.device("cpu"))
    image, text = np.divmod(np.random.default_rng(0).permutation(144)[:30], 12)
    judge = _build_judge(config(vlm), {})
    found = _judge_by_image(opened, features, image, text, judge)
    pictures = [data.show(number)[0] for number in range(12)]
    pairs = pairs_of(pictures, captions, image, text)
    assert found.tolist() == pytest.approx(one_by_one(vlm, pairs), abs=1e-5)


# Training


def train_three_steps(folder, arch, checkpoint, **changes):
    run_here(
        folder,
        **VIEW,
        run__max_epoch=1,
        run__max_steps=3,
        model__mafa__con_d__arch=arch,
        model__mafa__con_d__checkpoint=checkpoint,
        model__mafa__con_d__self_check_pairs=16,
        model__mafa__connections__low=0.5,
        model__mafa__connections__high=0.5,
        **changes,
    )


def test_training_converts_by_its_verdicts(tmp_path, vlm, monkeypatch):
    judged, judge = [], _YesNo.judge

    def recorded(self, samples, image_of, text_of, ranks=None, seen=None):
        found = judge(self, samples, image_of, text_of, ranks, seen)
        judged.append((samples, image_of, text_of, found))
        return found

    monkeypatch.setattr(_YesNo, "judge", recorded)
    question = {"model__mafa__con_d__yes_no__question": "a {caption} ?"}
    train_three_steps(
        tmp_path, "yes_no", vlm, **question, model__mafa__connections__action="convert"
    )
    (check,) = records(tmp_path, "con_d_self_check")
    assert check["pairs"] == 16 and 0 <= check["auc"] <= 1
    steps = records(tmp_path, "step")
    of_steps = [one for one in judged if "con_d_image" in one[0] and len(one[1]) <= 16][-3:]
    assert len(steps) == len(of_steps) == 3
    for samples, image_of, text_of, found in of_steps:
        pictures = [_picture_of(one) for one in samples["con_d_image"]]
        pairs = pairs_of(pictures, samples["text_input"], image_of, text_of)
        assert found.tolist() == pytest.approx(one_by_one(vlm, pairs, "a {caption} ?"), abs=1e-4)
    converted = sum(step["found_i2t"] + step["found_t2i"] for step in steps)
    kept = sum(step["kept_i2t"] + step["kept_t2i"] for step in steps)
    assert converted > 0 and kept > 0
    assert converted >= sum(int((one[3] > 0.5).sum()) for one in of_steps)


def test_data_without_a_picture_are_refused(tmp_path, vlm):
    """The toy world draws tensors unless it is given a processor."""
    with pytest.raises(ValueError, match="set vis_processor of the data set"):
        run_here(tmp_path, model__mafa__con_d__arch="yes_no", model__mafa__con_d__checkpoint=vlm)


# Bad input


def refusal(path, arch="yes_no", **changes):
    """Return the error of a judge's construction."""
    given = {"arch": arch, "checkpoint": None if path is None else str(path), **changes}
    found, problems = check_con_d(given)
    assert problems == []
    with pytest.raises(ValueError) as caught:
        build_discriminator(found)
    return str(caught.value)


def without(source, folder, *names):
    shutil.copytree(source, folder)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    return folder


PROCESSOR = ("processor_config.json", "preprocessor_config.json")


def test_wrong_configs_are_refused(tmp_path, vlm):
    place = "model.mafa.con_d"
    assert refusal(None).startswith(f"{place}.checkpoint: missing; yes_no needs a folder")
    for own, expected in (
        ({"question": "Match?"}, f"{place}.yes_no.question: has no {{caption}}"),
        ({"prompt": "<image>"}, f"{place}.yes_no.prompt: has no {{question}}"),
        ({"yes": "Yes indeed"}, "makes 2 tokens of the answer 'Yes indeed'"),
        ({"yes": "Yes indeed"}, "yes_no.yes"),
        ({"no": "Never"}, "its token of unknown words of the answer 'Never'"),
        ({"no": "Yes"}, "are the same token"),
    ):
        assert expected in refusal(vlm, yes_no=own)
    found = refusal(without(vlm, tmp_path / "no_processor", *PROCESSOR))
    assert found.startswith(f"{place}.checkpoint: ") and "name a vision-language model" in found
    found = refusal(save_vlm(tmp_path / "plain", template=None))
    assert "has no chat template" in found and "yes_no.prompt" in found


def test_missing_weights_are_refused(tmp_path, vlm):
    from safetensors.torch import load_file, save_file

    folder = without(vlm, tmp_path / "partly")
    weights = load_file(folder / "model.safetensors")
    (name,) = [one for one in weights if one.endswith("layers.0.mlp.down_proj.weight")]
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights of .*down_proj"):
        build_discriminator(config(str(folder)))


@pytest.mark.parametrize("arch", ["yes_no", "cross_encoder"])
def test_code_next_to_a_model_is_never_run(tmp_path, request, arch):
    source = request.getfixturevalue("vlm" if arch == "yes_no" else "encoder")
    folder, proof = without(source, tmp_path / "code"), tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(proof)!r}, 'w').close()\nclass Evil: pass\n")
    file = folder / ("config.json" if arch == "yes_no" else "modules.json")
    content = json.loads(file.read_text())
    if arch == "yes_no":
        content["model_type"] = "never_heard_of"
        content["auto_map"] = dict.fromkeys(
            ("AutoConfig", "AutoModelForImageTextToText", "AutoProcessor"), "evil.Evil"
        )
    else:
        content[1]["type"] = "evil.Evil"
    file.write_text(json.dumps(content))
    with pytest.raises((ValueError, AssertionError)):
        build_discriminator(config(str(folder), arch))
    assert not proof.exists()


def test_old_transformers_are_refused(vlm, monkeypatch):
    import transformers

    monkeypatch.delattr(transformers, "AutoModelForImageTextToText")
    monkeypatch.setattr(type(transformers), "__getattr__", _absent)
    assert "needs transformers >= 4.46" in refusal(vlm)


def _absent(module, name):
    raise AttributeError(name)


# Cross-encoders


def test_missing_sentence_transformers_is_refused(vlm, monkeypatch):
    def absent(name):
        raise cross_encoder.PackageNotFoundError(name)

    for version, expected in ((absent, "is not installed"), (lambda _: "5.4.1", "this is 5.4.1")):
        monkeypatch.setattr(cross_encoder, "version", version)
        found = refusal(vlm, "cross_encoder")
        assert expected in found and 'pip install "sentence-transformers>=6"' in found


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, vlm):
    """A folder with a CrossEncoder: the tiny model, and the log-odds of Yes as its score."""
    pytest.importorskip("sentence_transformers", minversion="6")
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    folder = str(tmp_path_factory.mktemp("encoder"))
    score = LogitScore(WORDS.index("Yes"), WORDS.index("No"))
    CrossEncoder(modules=[Transformer(vlm, transformer_task="any-to-any"), score]).save_pretrained(
        folder
    )
    return folder


@pytest.mark.parametrize("batch_size", [1, 4])
def test_cross_encoder_equals_its_own_loop(encoder, batch_size):
    from sentence_transformers import CrossEncoder

    con_d = build_discriminator(
        config(encoder, "cross_encoder", cross_encoder={"batch_size": batch_size})
    )
    pictures, captions = drawn_pictures(3), ["a red circle", "blue", "a small large green square"]
    image_of, text_of = torch.tensor([0, 1, 2, 0, 2]), torch.tensor([0, 1, 2, 2, 0])
    found = con_d.judge(samples_of(con_d, pictures, captions), image_of, text_of)
    theirs = CrossEncoder(encoder, device="cpu")
    scores = [
        float(theirs.predict(pair, activation_fn=torch.nn.Identity()))
        for pair in pairs_of(pictures, captions, image_of, text_of)
    ]
    expected = torch.sigmoid(torch.tensor(scores))
    assert torch.allclose(found, expected, atol=1e-5) and found.std() > 0.01


def test_training_with_a_cross_encoder(tmp_path, encoder):
    train_three_steps(tmp_path, "cross_encoder", encoder)
    steps = records(tmp_path, "step")
    assert sum(step["judged_pairs"] for step in steps) > 0
    assert records(tmp_path, "con_d_self_check")[0]["pairs"] == 16
