"""`count` and `mine` of pairs in files, by encoders and judges of other libraries."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fresh import fresh_python
from PIL import Image
from shard_files import write_rows, write_shards

from lavis_mafa.cli import main
from lavis_mafa.data.annotation_files import read_rows
from lavis_mafa.tools.judged_pairs import Judged

WORDS = "red green blue grey circle square line dot large small left right top bottom".split()
IMAGES, CAPTIONS = 24, 2
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES["num_attention_heads"] = 2


def caption(number):
    draw = np.random.default_rng(number)
    return " ".join(WORDS[k] for k in draw.permutation(len(WORDS))[:4])


ROWS = [
    {"image": f"{k // CAPTIONS}.png", "caption": caption(k), "image_id": k // CAPTIONS}
    for k in range(IMAGES * CAPTIONS)
]
ROWS[9]["caption"] = ROWS[1]["caption"].upper()  # of image 4, as image 0 has it


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Pictures, their captions as JSON, and features: image 0 is like captions 2 and 9."""
    folder = tmp_path_factory.mktemp("world")
    noise = np.random.default_rng(0)
    for k in range(IMAGES):
        Image.fromarray(noise.integers(0, 256, (16, 16, 3), np.uint8)).save(folder / f"{k}.png")
    (folder / "pairs.json").write_text(json.dumps(ROWS))
    images = np.eye(IMAGES, dtype=np.float32)
    texts = images.repeat(CAPTIONS, 0) + 0.1 * noise.normal(size=(len(ROWS), IMAGES))
    texts[2] = images[0]
    texts[9] += 0.5 * images[0]
    np.save(folder / "images.npy", images)
    np.save(folder / "texts.npy", texts.astype(np.float32))
    return folder


def tokenizer(folder, **options):
    from transformers import BertTokenizerFast

    folder.mkdir()
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(tokens))
    return BertTokenizerFast(str(folder / "vocab.txt"), **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with tiny random models of other libraries."""
    transformers = pytest.importorskip("transformers")
    library = pytest.importorskip("sentence_transformers", minversion="6")
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    size = {"height": 16, "width": 16}
    for kind in ("CLIP", "Siglip"):
        more = {} if kind == "CLIP" else {"model_input_names": ["input_ids"]}
        words = tokenizer(folder / kind, model_max_length=8, **more)
        text = {**SIZES, "vocab_size": len(words), "max_position_embeddings": 8}
        text |= {"projection_size": 16, "eos_token_id": words.sep_token_id}
        vision = {**SIZES, "image_size": 16, "patch_size": 8}
        config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
        getattr(transformers, f"{kind}Model")(config).save_pretrained(folder / kind)
        pictures = getattr(transformers, f"{kind}ImageProcessor")(size=size, crop_size=size)
        getattr(transformers, f"{kind}Processor")(pictures, words).save_pretrained(folder / kind)
    for name, kind, more in (
        ("bert", transformers.BertModel, {}),
        ("cross", transformers.BertForSequenceClassification, {"num_labels": 1}),
    ):
        words = tokenizer(folder / name)
        kind(transformers.BertConfig(vocab_size=len(words), **SIZES, **more)).save_pretrained(
            folder / name
        )
        words.save_pretrained(folder / name)
    modules = [Transformer(str(folder / "bert")), Pooling(16)]
    library.SentenceTransformer(modules=modules, device="cpu").save_pretrained(
        str(folder / "sentences")
    )
    return folder


def features(world):
    return [world / "images.npy", world / "texts.npy"]


def run(command, data, encoder, output, *more):
    given = [command, "--data", data, "--encoder", *encoder, "--output", output, *more]
    return main(list(map(str, given)))


def read(path):
    return json.loads(path.read_text())


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def stored(folder, name):
    kind, *shape = read(folder / "features" / "samples.json")["arrays"][name]
    return np.fromfile(folder / "features" / f"{name}.bin", kind).reshape(shape)


WITHOUT_LAVIS = """
import sys
for name in ("lavis", "omegaconf", "timm", "fairscale", "iopath"):
    sys.modules[name] = None  # an import fails
from lavis_mafa.cli import main
data, images, texts, output = sys.argv[1:]
common = ["--data", data, "--encoder", images, texts]
assert main(["count", *common, "--judge", "captions", "--output", output + "/count"]) == 0
assert main(["mine", *common, "--output", output + "/mine"]) == 0
assert main(["label", "page", output + "/mine", "--output", output + "/labels.html"]) == 0
try:
    main(["check-data", data])
except SystemExit as error:
    print("check-data without LAVIS:", error.code)
"""


@pytest.mark.parametrize("form", ["json", "parquet"])
def test_it_runs_without_lavis(world, tmp_path, form):
    data = world / "pairs.json" if form == "json" else as_parquet(world, ROWS)
    names = [data, *features(world), tmp_path]
    printed = fresh_python("-c", WITHOUT_LAVIS, *names)
    assert "False hard negatives by captions: " in printed
    assert "No judge: P is the share of own pairs" in printed
    assert "check-data without LAVIS: 2" in printed
    counts = read(tmp_path / "count" / "counts.json")
    assert counts["encoder"] == [str(one) for one in features(world)]
    assert {one["sampling"] for one in counts["counts"]} == {"random", "grit"}
    assert (tmp_path / "count" / "report.html").read_text().count("data:image/") > 20
    (mined,) = [one for one in read(tmp_path / "mine" / "mined.json") if one["score"] > 0.9]
    assert mined["caption"] == ROWS[2]["caption"] and mined["image_id"] == 0
    assert ROWS[2]["caption"] in (tmp_path / "labels.html").read_text()


def test_counts_equal_a_slow_loop(world, tmp_path):
    """P is the rank among own pairs, and no candidate is another caption of the image."""
    more = ["--sampling", "random", "--batch-sizes", 8]
    assert run("count", world / "pairs.json", features(world), tmp_path, *more) == 0
    images, texts = (np.load(one) for one in features(world))
    texts /= np.linalg.norm(texts, axis=1, keepdims=True)
    similarity = (images @ texts.T).repeat(CAPTIONS, 0)
    own = np.sort(similarity.diagonal())
    judged = Judged.load(tmp_path)
    found = judged.probability["similarity"]
    for row, (image, text) in enumerate(zip(judged.image, judged.text, strict=True)):
        expected = (own < similarity[image, text] - 1e-6).mean()
        assert found[row] == pytest.approx(expected, abs=1 / len(own) + 1e-6)
        assert ROWS[image]["image"] != ROWS[text]["image"]
    counts = read(tmp_path / "counts.json")["counts"]
    assert sum(one["judged"] for one in counts) == 2 * len(ROWS)
    assert counts[0]["low"] <= counts[0]["share"] <= counts[0]["high"]


def outputs_of(model, processor, texts, pictures):
    options = {"padding": "max_length", "truncation": True, "max_length": 8, "return_tensors": "pt"}
    with torch.no_grad():
        return model(**processor(text=texts, images=pictures, **options))


SLOWLY = """
import sys, time
import transformers
real = transformers.CLIPModel.get_text_features
def slow(self, *args, **options):
    time.sleep(0.5)
    return real(self, *args, **options)
transformers.CLIPModel.get_text_features = slow
from lavis_mafa.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_terminated_audit_is_resumed(world, models, tmp_path, caplog):
    rows = [{"image": f"{k % IMAGES}.png", "caption": caption(k)} for k in range(600)]
    data, out = as_json(tmp_path, rows), tmp_path / "out"
    more = ["--images", world, "--sampling", "random", "--judge", "captions"]
    given = ["count", "--data", data, "--encoder", models / "CLIP", "--output", out, *more]
    command = [sys.executable, "-c", SLOWLY, *map(str, given)]
    begun = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while begun.poll() is None and not (out / "features" / "block_000000.npz").is_file():
        time.sleep(0.05)
    begun.send_signal(signal.SIGTERM)
    told = begun.communicate()[1]
    assert begun.returncode == 75, told
    assert f"rerun the same command to resume; {out / 'features'} keeps" in told
    assert "Traceback" not in told
    caplog.set_level("INFO")
    assert run("count", data, [models / "CLIP"], out, *more) == 0
    assert "encoding 344 of 600 samples" in caplog.text
    assert run("count", data, [models / "CLIP"], tmp_path / "whole", *more) == 0
    assert read(out / "counts.json") == read(tmp_path / "whole" / "counts.json")


@pytest.mark.parametrize("side", ["images", "texts"])
@pytest.mark.parametrize("value", [0, np.nan])
def test_rows_of_features_without_a_direction_are_named(world, tmp_path, caplog, side, value):
    wrong = {name: np.load(world / f"{name}.npy") for name in ("images", "texts")}
    wrong[side][[3, 7]] = value
    files = [tmp_path / f"{name}.npy" for name in wrong]
    for file, content in zip(files, wrong.values(), strict=True):
        np.save(file, content)
    assert run("count", world / "pairs.json", files, tmp_path / "out") == 1
    assert f"{tmp_path / side}.npy: rows [3, 7] are zero, NaN or infinite" in caplog.text


def test_a_copy_of_shards_is_read_with_their_pictures(world, tmp_path, capsys):
    samples = [
        (f"{k:03d}", (world / f"{k}.png").read_bytes(), "png", ROWS[2 * k]["caption"], {})
        for k in range(IMAGES)
    ]
    shards = write_shards(tmp_path / "shards", samples)
    texts = np.load(world / "texts.npy")[::CAPTIONS]
    texts[1] += 2 * texts[0]
    np.save(tmp_path / "texts.npy", texts)
    files = [world / "images.npy", tmp_path / "texts.npy"]
    out = tmp_path / "out"
    assert run("mine", shards, files, out, "--threshold", 0.5) == 0
    root = out / "images"
    assert f"clean.jsonl (read it with --images {root})" in capsys.readouterr().out
    found = list(read_rows(out / "clean.jsonl"))
    assert len(found) > IMAGES == len({row.image for row in found})
    more = [world / "images.npy", tmp_path / "more.npy"]
    np.save(more[1], np.ones((len(found), IMAGES), np.float32))
    again = [tmp_path / "again", "--images", root]
    assert run("count", out / "clean.jsonl", more, *again) == 0
    page = (tmp_path / "again" / "report.html").read_text()
    assert "could not be read" not in page and page.count("data:image/") > 5


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_missing_text_columns_are_named_with_those_that_exist(tmp_path, caplog, form):
    rows = [{"question": caption(k), "answer": caption(100 + k)} for k in range(8)]
    path = write_rows(tmp_path / f"pairs.{form}", rows)
    np.save(tmp_path / "one.npy", np.eye(8, dtype=np.float32))
    files = [tmp_path / "one.npy", tmp_path / "one.npy"]
    assert run("count", path, files, tmp_path / "out", "--text-keys", "question", "answr") == 1
    assert "--text-keys question answr: " in caplog.text
    assert "expected answr, found 'question', 'answer'; name one of them" in caplog.text


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_features_equal_the_librarys(world, models, tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    assert run("count", world / "pairs.json", [models / kind], tmp_path) == 0
    model = transformers.AutoModel.from_pretrained(models / kind).eval()
    processor = transformers.AutoProcessor.from_pretrained(models / kind)
    pictures = [Image.open(world / f"{k}.png") for k in range(IMAGES)]
    found = outputs_of(model, processor, [row["caption"] for row in ROWS], pictures)
    images = found.image_embeds.repeat_interleave(CAPTIONS, 0)
    torch.testing.assert_close(torch.tensor(stored(tmp_path, "vectors")), images)
    torch.testing.assert_close(torch.tensor(stored(tmp_path, "texts")), found.text_embeds)


def test_a_siglip_judges(world, models, tmp_path):
    more = ["--judge", models / "Siglip", "--self-check", "skip", "--threshold", 0]
    assert run("mine", world / "pairs.json", [models / "CLIP"], tmp_path, *more) == 0
    judged = Judged.load(tmp_path)
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(models / "Siglip").eval()
    processor = transformers.AutoProcessor.from_pretrained(models / "Siglip")
    for row in range(0, len(judged), 40):
        picture = Image.open(world / ROWS[judged.image[row]]["image"])
        found = outputs_of(model, processor, [ROWS[judged.text[row]]["caption"]], picture)
        expected = found.logits_per_image.sigmoid().item()
        assert judged.probability["judge"][row] == pytest.approx(expected, rel=1e-3)


def test_pairs_of_two_texts(models, tmp_path):
    rows = [{"question": caption(k // 2), "answer": caption(100 + k)} for k in range(40)]
    write_rows(tmp_path / "pairs.jsonl", rows)
    keys = ["--text-keys", "question", "answer", "--self-check", "skip"]
    more = [*keys, "--judge", models / "cross", "--threshold", 0.4]
    assert run("mine", tmp_path / "pairs.jsonl", [models / "sentences"], tmp_path, *more) == 0
    library = pytest.importorskip("sentence_transformers")
    judge = library.CrossEncoder(str(models / "cross"), device="cpu")
    mined = read(tmp_path / "mined.json")
    assert mined and all(one["anchor"] != one["positive"] for one in mined)
    scores = judge.predict(
        [(one["anchor"], one["positive"]) for one in mined], activation_fn=torch.nn.Sigmoid()
    )
    assert [one["score"] for one in mined] == pytest.approx(scores.tolist(), abs=1e-4)
    new = [{"question": one["anchor"], "answer": one["positive"]} for one in mined]
    assert lines(tmp_path / "clean.jsonl") == rows + new
    questions = {row["question"] for row in rows}
    assert {one["query"] for one in lines(tmp_path / "flag_embedding.jsonl")} <= questions
    shown = f"{mined[0]['anchor']} – {mined[0]['positive']}"
    assert shown in (tmp_path / "report.html").read_text()
    more = ["--text-keys", "question", "answer", "--judge", "captions"]
    out = tmp_path / "count"
    assert run("count", tmp_path / "pairs.jsonl", [models / "sentences"], out, *more) == 0
    assert read(out / "counts.json")["counts"]


@pytest.mark.parametrize(
    ("encoder", "judge", "message"),
    [
        ("CLIP", "cross", "pairs of two texts (--text-keys) need a SentenceTransformer"),
        # sentence-transformers would give these a head of random weights.
        ("sentences", "bert", "got a BertModel, which has no head that judges"),
        ("sentences", "Siglip", "got a SiglipModel, which has no head that judges"),
    ],
)
def test_other_models_of_two_texts_are_refused(models, tmp_path, encoder, judge, message, caplog):
    rows = [{"question": caption(k), "answer": caption(9 + k)} for k in range(8)]
    data = write_rows(tmp_path / "pairs.json", rows)
    more = ["--text-keys", "question", "answer", "--judge", models / judge]
    assert run("mine", data, [models / encoder], tmp_path / "out", *more) == 1
    assert message in caplog.text


def as_json(folder, rows):
    return write_rows(folder / "pairs.json", rows)


def as_lines(folder, rows):
    return write_rows(folder / "pairs.jsonl", [{**row, "more": [1]} for row in rows])


def as_table(folder, rows):
    rows = [{"more": 'with "quotes"', **row} for row in rows]
    return write_rows(folder / "pairs.tsv", rows)


def as_old_mac_table(folder, rows):
    lines = [",".join(map(str, row)) for row in ([*rows[0]], *(one.values() for one in rows))]
    (folder / "pairs.csv").write_bytes("\r".join(lines).encode())
    return folder / "pairs.csv"


def as_parquet(folder, rows):
    path = folder / "pairs.parquet"
    names = [row["image"] for row in rows]
    images = [{"bytes": (folder / name).read_bytes(), "path": name} for name in names]
    columns = {name: [row[name] for row in rows] for name in ("caption", "image_id")}
    pq.write_table(pa.table({"more": [1.5] * len(rows), "image": images, **columns}), path)
    return path


def as_parquet_of_paths(folder, rows):
    """As ``datasets`` writes paths, and ids that are texts."""
    schema = [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))]
    schema += [("caption", pa.string()), ("image_id", pa.string())]
    rows = [
        {**row, "image": {"path": row["image"]}, "image_id": str(row["image_id"])} for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(schema)), folder / "pairs.parquet")
    return folder / "pairs.parquet"


def as_parquet_of_lists(folder, rows):
    """As polars writes lists, and with a column that may not be null."""
    schema = [("image", pa.string()), ("caption", pa.large_list(pa.string()))]
    schema += [("image_id", pa.int64()), pa.field("size", pa.int64(), nullable=False)]
    rows = [{**row, "caption": [row["caption"]], "size": 16} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(schema)), folder / "pairs.parquet")
    return folder / "pairs.parquet"


def as_coco(folder, rows):
    images = [{"id": k, "file_name": f"{k}.png"} for k in range(IMAGES)]
    path = folder / "coco.json"
    path.write_text(json.dumps({"images": images, "annotations": rows}, indent=1))
    return path


FORMS = [as_json, as_lines, as_table, as_old_mac_table, as_parquet, as_parquet_of_paths]
FORMS += [as_parquet_of_lists, as_coco]


@pytest.mark.parametrize("write", FORMS)
def test_a_copy_has_the_own_rows_and_the_missing_pairs(world, tmp_path, write, capsys):
    for k in range(IMAGES):
        (tmp_path / f"{k}.png").write_bytes((world / f"{k}.png").read_bytes())
    data, out = write(tmp_path, ROWS), tmp_path / "out"
    assert run("mine", data, features(world), out, "--threshold", 0.9) == 0
    copy = out / f"clean{'.jsonl' if write is as_coco else data.suffix}"
    told = f"{copy.name} (read it with --images {tmp_path}),"
    assert (told in capsys.readouterr().out) == (write is not as_parquet)
    assert not (out / "augmented.json").exists()
    own, found = list(read_rows(data)), list(read_rows(copy))
    (new,) = read(out / "mined.json")
    assert [row.captions for row in found] == [*(row.captions for row in own), [new["caption"]]]
    assert found[-1].image_id == found[0].image_id == own[0].image_id == "0"
    if write is as_parquet:
        assert bytes(found[-1].stored.content) == (world / "0.png").read_bytes()
        assert pq.read_table(copy).column("more").to_pylist() == [1.5] * len(ROWS) + [None]
    else:
        assert [row.image for row in found] == [*(row.image for row in own), "0.png"]
    if write in (as_lines, as_table):
        assert copy.read_text().startswith(data.read_text())


def test_triplets_have_no_positive_as_negative(world, tmp_path):
    assert run("mine", world / "pairs.json", features(world), tmp_path, "--threshold", 0.9) == 0
    triplets, lists = lines(tmp_path / "triplets.jsonl"), lines(tmp_path / "flag_embedding.jsonl")
    assert len(triplets) == len(ROWS) + 1 and len(lists) == IMAGES
    captions = {}
    for row in [*ROWS, {"image": "0.png", "caption": ROWS[2]["caption"]}]:
        captions.setdefault(str(world / row["image"]), []).append(row["caption"])
    assert {one["query"]: one["pos"] for one in lists} == captions
    for one in lists:
        wrong, right = ({text.lower() for text in one[side]} for side in ("neg", "pos"))
        assert wrong and not wrong & right
    negatives = {one["query"]: one["neg"] for one in lists}
    for one in triplets:
        assert one["positive"] in captions[one["anchor"]]
        wrong = [one[f"negative_{n}"] for n in (1, 2, 3)]
        assert wrong == negatives[one["anchor"]][:3] and len(one) == 5


def test_a_few_missing_pictures_are_counted_and_many_refused(world, models, tmp_path, caplog):
    rows = [{**row, "image_id": None} for row in ROWS]
    rows += [{**row, "caption": f"{row['caption']} {n}"} for n in range(3) for row in rows]
    rows[7] = {**rows[7], "image": "gone.png"}
    (world / "few.json").write_text(json.dumps(rows))
    with caplog.at_level("INFO"):
        assert run("count", world / "few.json", [models / "CLIP"], tmp_path / "few") == 0
    assert read(tmp_path / "few" / "counts.json")["unreadable"] == [7]
    assert "1 samples could not be read" in caplog.text and "gone.png" in caplog.text
    rows[8] = {**rows[8], "image": "lost.png"}
    (world / "many.json").write_text(json.dumps(rows))
    assert run("count", world / "many.json", [models / "CLIP"], tmp_path / "many") == 1
    assert "the pictures of 2 of 192 pairs cannot be read" in caplog.text
    assert "lost.png" in caplog.text and "Traceback" not in caplog.text
    more = ["--images", tmp_path, "--judge", models / "Siglip"]
    assert run("count", world / "pairs.json", features(world), tmp_path / "none", *more) == 1
    assert "pairs have no verdict, because their pictures cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("encoder", "judge", "message"),
    [
        (["./nothing"], None, "--encoder ./nothing: no such folder"),
        (["bert"], None, "got a model of the kind 'bert', expected a folder"),
        (["sentences"], None, "reads only texts: name the columns of pairs of two texts by --text"),
        (["CLIP"], "CLIP", "a CLIP has learned no bound for a match; expected BLIP-2"),
        (["CLIP"], "cross", "this CrossEncoder reads only texts; for images expected BLIP-2"),
        (["images.npy"], None, "expected two .npy files, of images and of captions"),
        (["texts.npy", "images.npy"], None, "expected real numbers (48, E) twice"),
    ],
)
def test_other_models_are_refused(world, models, tmp_path, caplog, encoder, judge, message):
    places = {name: world / name for name in ("images.npy", "texts.npy")}
    given = [places.get(one, models / one if "/" not in one else one) for one in encoder]
    more = ["--judge", models / judge] if judge else []
    assert run("count", world / "pairs.json", given, tmp_path, *more) == 1
    assert message in caplog.text and "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--data", "pairs.json"], "--data needs --encoder"),
        (["--data", ".", "--encoder", "x", "--text-keys", "a", "b", "--image-key", "c"], "both"),
        (["--cfg-path", "albef_toy", "--judge", "captions"], "--judge needs --data"),
        (["--data", "pairs.json", "--encoder", "x", "--con-d", "a.arch=b"], "--con-d needs"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(world, monkeypatch, capsys, given, message):
    monkeypatch.chdir(world)
    with pytest.raises(SystemExit):
        main(["count", "--output", "out", *given])
    assert message in capsys.readouterr().err


def test_a_missing_package_is_named(world, models, tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert run("count", world / "pairs.json", [models / "sentences"], tmp_path) == 1
    assert "sentence_transformers, which is not installed" in caplog.text
    assert 'pip install "lavis-mafa[audit]"' in caplog.text


def test_pairs_that_may_match_are_not_negatives(world, tmp_path):
    """Between the thresholds a candidate is neither a missing pair nor a negative."""
    assert run("mine", world / "pairs.json", features(world), tmp_path, "--threshold", 1) == 0
    assert read(tmp_path / "mined.json") == []
    first = lines(tmp_path / "flag_embedding.jsonl")[0]
    assert first["query"] == str(world / "0.png") and len(first["neg"]) >= 3
    assert ROWS[2]["caption"] not in first["neg"] + first["pos"]
