"""Hard negatives of a data set with a column of pictures, by a tiny CLIP and a judge."""

from __future__ import annotations

import numpy as np
import pytest
import torch

sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6")
pytest.importorskip("datasets")

from datasets import Dataset, Image  # noqa: E402
from PIL import Image as Pictures  # noqa: E402
from PIL import ImageColor  # noqa: E402
from tiny_sentences import WORDS, cross_encoder, encoder, pairs  # noqa: E402
from transformers import (  # noqa: E402
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizerFast,
)

from lavis_mafa import MiningRule, StepSettings  # noqa: E402
from lavis_mafa.integrations import sentence_transformers as integration  # noqa: E402
from lavis_mafa.integrations.cross_encoders import PAIR_TEXTS, Guide  # noqa: E402
from lavis_mafa.integrations.pair_loss import PairLoss  # noqa: E402
from lavis_mafa.integrations.sentence_transformers import mine_hard_negatives  # noqa: E402

COLOURS = ["red", "green", "blue", "grey"]


def clip(folder):
    """Return a tiny CLIP with random weights as a SentenceTransformer."""
    tokens = ["<|startoftext|>", "<|endoftext|>", *(f"{word}</w>" for word in WORDS)]
    tokens += [chr(97 + n) + end for n in range(26) for end in ("", "</w>")]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes["num_attention_heads"] = 2
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    text = {**sizes, **ids, "vocab_size": len(tokens), "max_position_embeddings": 32}
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    CLIPModel(config).save_pretrained(folder)
    tokenizer = CLIPTokenizerFast(vocab={one: n for n, one in enumerate(tokens)}, merges=[])
    crop = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    CLIPProcessor(CLIPImageProcessor(**crop), tokenizer).save_pretrained(folder)
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


class SameColour:
    """Knows that a caption matches every picture of its colour."""

    def __init__(self, data):
        self.colour = [caption.split()[0] for caption in data["caption"]]

    def judge(self, samples, image_of, text_of, ranks=None, seen=None):
        same = [self.colour[i] == self.colour[t] for i, t in zip(image_of, text_of, strict=True)]
        return torch.tensor(same, dtype=torch.float32)


def test_pictures(tmp_path):
    """Pictures of a colour are equal, so that a caption of one is a known match of all of them."""
    rows = [(colour, size) for colour in COLOURS for size in (18, 20, 18)]
    pictures = [Pictures.new("RGB", (size, size), colour) for colour, size in rows]
    captions = [f"{colour} {WORDS[n % 9]}" for n, (colour, _) in enumerate(rows)]
    data = Dataset.from_dict({"image": pictures, "caption": captions}).cast_column("image", Image())
    settings = StepSettings(connections=MiningRule())
    mined, missing = mine_hard_negatives(
        data, clip(tmp_path), settings, SameColour(data), negatives=2, search=12
    )
    assert mined.column_names == ["image", "caption", "negative_1", "negative_2"]
    assert len(mined) == 12 and missing.column_names == ["image", "caption"]
    for row in mined:
        colours = {row[name].split()[0] for name in ("negative_1", "negative_2")}
        assert row["caption"].split()[0] not in colours
        assert row["negative_1"] != row["negative_2"]
    # Of a colour the two equal pictures lack the caption of the third, and this one both of theirs.
    assert len(missing) == len(COLOURS) * 3
    for row in missing:
        ((_, shown),) = row["image"].getcolors()
        assert shown == ImageColor.getrgb(row["caption"].split()[0])


def test_rows_without_enough_negatives_are_counted(tmp_path, caplog):
    """Without a judge, what is more similar than the own pair is no negative."""
    data, model = pairs(24), encoder(tmp_path)
    mined, missing = mine_hard_negatives(data, model, negatives=2, search=12)
    left_out = len(data) - len(mined)
    assert 0 < left_out < 24 and f"{left_out} of 24 rows have fewer than 2" in caplog.text
    known = {*zip(data["anchor"], data["positive"], strict=True)}
    found = {*zip(missing["anchor"], missing["positive"], strict=True)}
    assert found and not found & known

    def similarity(column):
        sides = model.encode(list(mined["anchor"])), model.encode(list(mined[column]))
        return torch.nn.functional.cosine_similarity(*map(torch.from_numpy, sides))

    for name in ("negative_1", "negative_2"):
        assert bool((similarity(name) <= 0.95 * similarity("positive") + 1e-5).all())


def test_a_cross_encoder_reads_the_pairs_of_the_data_set(tmp_path):
    data = pairs(24).remove_columns("label")

    class Encoder(torch.nn.Linear):
        num_labels = 1

        def predict(self, read, **options):
            assert options["batch_size"] == 7
            return torch.tensor([anchor[0] == text[0] for anchor, text in read]).float()

    settings = StepSettings(connections=MiningRule())
    given = {"negatives": 1, "search": 20, "batch_size": 7}
    mined, missing = mine_hard_negatives(
        data, encoder(tmp_path), settings, judge=Encoder(1, 1), **given
    )
    assert len(mined) and len(missing)
    assert all(row["anchor"][0] != row["negative_1"][0] for row in mined)
    assert all(row["anchor"][0] == row["positive"][0] for row in missing)


@pytest.mark.parametrize("prompts", [{}, {"query": "red "}])
def test_every_text_is_encoded_once(tmp_path, monkeypatch, prompts):
    """A text that is an anchor and a positive, only once in all if both are encoded alike."""
    model, encoded = encoder(tmp_path), []
    model.prompts.update(prompts)
    real = model.encode

    def counted(inputs, **options):
        encoded.extend((text, options.get("prompt_name")) for text in inputs)
        return real(inputs, **options)

    monkeypatch.setattr(model, "encode", counted)
    monkeypatch.setattr(integration, "_AT_ONCE", 7)
    rows = pairs(40).to_dict()
    rows["positive"] = [rows["anchor"][(n + 1) % 10] for n in range(40)]
    given = {"negatives": 1, "search": 5}
    mined, missing = integration.mine_hard_negatives(Dataset.from_dict(rows), model, **given)
    if prompts:
        assert len(encoded) == len({*encoded}) == len({*rows["anchor"]}) + 10
    else:
        assert sorted(text for text, _ in encoded) == sorted({*rows["anchor"]})
    monkeypatch.setattr(integration, "_encodes_alike", lambda model: False)
    apart = integration.mine_hard_negatives(Dataset.from_dict(rows), model, **given)
    assert apart[0].to_list() == mined.to_list() and apart[1].to_list() == missing.to_list()


def test_negatives_without_a_judge_equal_the_librarys(tmp_path):
    """Also for anchors with several positives, of which the least similar gives the ceiling."""
    model, rows = encoder(tmp_path), pairs(60).to_dict()
    anchors = [rows["anchor"][n % 25] for n in range(60)]
    # The last five pairs are listed twice.
    data = Dataset.from_dict(
        {
            "anchor": anchors + anchors[-5:],
            "positive": rows["positive"] + rows["positive"][-5:],
        }
    )
    library = sentence_transformers.util.mine_hard_negatives(
        data,
        model,
        range_max=50,
        relative_margin=0.05,
        num_negatives=2,
        output_format="n-tuple",
        verbose=False,
    )
    mined, _ = mine_hard_negatives(data, model, negatives=2)
    found, expected = ({tuple(row.values()) for row in one} for one in (mined, library))
    assert len(mined) == len(found)
    # The library counts known positives among its candidates, and finds fewer.
    assert expected <= found and 10 < len(expected) and len(found) < 60


def test_a_mini_batch_without_pairs_is_refused_and_a_guide_judges_none(tmp_path):
    none, features = torch.zeros(0, dtype=torch.long), torch.zeros(0, 4)
    guide = Guide(encoder(tmp_path))
    assert guide.judge({PAIR_TEXTS: [[], []]}, none, none).shape == (0,)
    for judge in (None, guide):
        for texts in (features, torch.ones(2, 4)):
            with pytest.raises(
                ValueError, match=r"got features \(0, 4\) and .*, expected \(B, E\)"
            ):
                PairLoss(judge=judge).loss(features, texts, torch.tensor(0.1))


def test_what_cannot_be_mined_is_refused_before_anything_is_encoded(tmp_path, monkeypatch):
    model, cross, data = encoder(tmp_path), cross_encoder(tmp_path), pairs(12)
    real = model.encode_query
    monkeypatch.delattr(type(model), "encode_query")
    by_similarity = StepSettings(connections=MiningRule(score="similarity"))
    for given, told in (
        ({"judge": model}, "judge: got a SentenceTransformer, expected a CrossEncoder or"),
        ({"judge": cross, "settings": by_similarity}, "got a judge and score: similarity, which"),
        ({"settings": StepSettings()}, "got no judge and score: con_d; use score: similarity"),
        ({"negatives": 3, "search": 2}, "expected 1 <= negatives <= search, .* search=2"),
        ({"skip": -1}, "skip=-1"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            mine_hard_negatives(data, model, **given)
    # Without settings the thresholds are compared with the judge's probability.
    monkeypatch.setattr(type(model), "encode_query", lambda self, *a, **b: real(*a, **b), False)
    judged = [
        [one.to_list() for one in mine_hard_negatives(data, model, *given, negatives=1, search=5)]
        for given in ((None, cross), (StepSettings(), cross))
    ]
    assert judged[0] == judged[1]


def test_a_data_set_without_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="got 0 rows"):
        mine_hard_negatives(pairs(12).select([]), encoder(tmp_path))


def test_a_judge_that_returns_nan_is_refused(tmp_path):
    broken = cross_encoder(tmp_path)
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    data, settings = pairs(12), StepSettings(connections=MiningRule())
    with pytest.raises(ValueError, match="returned NaN for .* pairs: load it in float32"):
        mine_hard_negatives(data, encoder(tmp_path), settings, broken, negatives=1, search=4)
    guide, texts = encoder(tmp_path, seed=5), [["red dot", "blue dot"], ["red line", "blue line"]]
    with torch.no_grad():
        next(guide.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="returned NaN for 2 of 2 pairs"):
        Guide(guide).judge({PAIR_TEXTS: texts}, torch.arange(2), torch.arange(2))


def test_results_without_rows_keep_their_columns(tmp_path):
    data, settings = pairs(12), StepSettings(connections=MiningRule())

    class Certain:
        def __init__(self, probability):
            self.probability = probability

        def judge(self, samples, image_of, text_of, ranks=None, seen=None):
            return torch.full((len(image_of),), self.probability)

    for probability in (0.0, 1.0):
        mined, missing = integration.mine_hard_negatives(
            data, encoder(tmp_path), settings, Certain(probability), negatives=2, search=5
        )
        assert mined.column_names == ["anchor", "positive", "negative_1", "negative_2"]
        assert missing.column_names == ["anchor", "positive"]
        assert (len(mined) == 0, len(missing) == 0) == (probability == 1.0, probability == 0.0)


def test_texts_may_be_the_anchors_of_pictures():
    calls = []

    def encode(values, **_):
        calls.append({type(one) for one in values})
        return torch.zeros(len(values), 2)

    pictures = [Pictures.new("RGB", (4, 4), colour) for colour in COLOURS]
    texts, data = ({"column": COLOURS}, {"column": pictures})
    data = Dataset.from_dict(data).cast_column("column", Image())
    integration._encoded([Dataset.from_dict(texts), data], encode, 32)
    assert len(calls) == 2 and calls[0] == {str}


def test_pictures_are_equal_if_they_look_equal():
    """Of pictures with a palette, the bytes are numbers of colours; arrays also have a shape."""
    red = Pictures.new("RGB", (4, 4), "red")
    of_palettes = [Pictures.new("RGB", (4, 4), name).quantize(2) for name in ("red", "blue")]
    identity = integration._identity
    assert identity(red) == identity(of_palettes[0]) != identity(of_palettes[1])
    assert identity(red) != identity(Pictures.new("RGB", (2, 8), "red"))
    numbers = np.arange(6)
    assert identity(numbers.reshape(2, 3)) != identity(numbers.reshape(3, 2))
    assert identity(numbers) != identity(numbers.astype(np.uint64))
