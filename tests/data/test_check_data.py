"""The command check-data: every defect is found, clean data pass."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from shard_files import write_shards

from lavis_mafa.cli import main
from lavis_mafa.data.data_check import PROBLEMS, check, render
from lavis_mafa.data.make_vocab import SPECIAL_TOKENS, make_vocab
from lavis_mafa.data.pair_conversion import converted
from lavis_mafa.families.tokenizers import build_tokenizer


def save_noise_image(path: Path, size: tuple[int, int] = (64, 48), seed: int = 0) -> None:
    noise = np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """Two valid images and `clean.json` with three pairs, all in one folder."""
    save_noise_image(tmp_path / "a.png", seed=1)
    save_noise_image(tmp_path / "b.png", (80, 60), seed=2)
    rows = [{"image": "a.png", "caption": ["one two", "one two three"], "image_id": 1}]
    rows.append({"image": "b.png", "caption": ["one"], "image_id": 2})
    (tmp_path / "clean.json").write_text(json.dumps(rows))
    return tmp_path


def find_problems(root: Path, *rows: dict, **options) -> dict[str, list[str]]:
    """Return the problems that the checker finds in these rows."""
    path = root / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = check([path], root, workers=2, **options)["problems"]
    return {key: findings for key, findings in found.items() if findings}


def test_paths_without_a_folder_are_refused(clean: Path) -> None:
    with pytest.raises(ValueError, match="--images"):
        check([clean / "clean.json"])


def test_clean_data_pass(clean: Path, capsys) -> None:
    out = clean / "report.json"
    arguments = [f"{clean}/clean.json", "--images", str(clean), "--json", str(out)]
    assert main(["check-data", *arguments, "--workers", "2"]) == 0
    report = json.loads(out.read_text())
    assert report == {
        "pairs": 3,
        "images": 2,
        "records": 2,
        "unusable": 0,
        "fatal": False,
        "passed_over": 0,
        "problems": {key: [] for key in PROBLEMS},
    }
    printed = capsys.readouterr().out
    assert "pairs   3\nimages  2\n" in printed
    assert printed.endswith("no problems\n")


def test_pictures_and_rows_that_training_cannot_use_are_found(clean: Path) -> None:
    (clean / "text.png").write_text("<html>")
    (clean / "cut.png").write_bytes((clean / "b.png").read_bytes()[:-99])
    shutil.copy(clean / "a.png", clean / "copy.png")
    names = ["gone", "text", "cut", "copy", "./a"]
    found = find_problems(
        clean,
        {"image": "a.png", "caption": ["x", " ", "x"], "image_id": 1},
        {"image": "b.png", "caption": ["x", "y"], "image_id": 1},
        {"image": "b.png", "caption": "z", "image_id": 2},
        {"image": "b.png", "caption": 5},
        *({"image": f"{name}.png", "caption": f"<image> {name}"} for name in names),
        {"image": "a.png", "caption": " ".join(["word"] * 51)},
    )
    path = clean / "rows.jsonl"
    assert [line.split(":")[0] for line in found.pop("unreadable_images")] == [
        "'text.png'",
        "'cut.png'",
    ]
    assert len(found.pop("placeholders")) == 5
    assert found.pop("cut_captions") == [f"{path}, line 10: 'a.png' has 51 words"]
    assert found == {
        "missing_files": ["'gone.png'"],
        "duplicate_images": ["'copy.png' has the content of 'a.png'"],
        "malformed_rows": [f"{path}, line 4: 'caption': expected a string or strings, got [5]"],
        "empty_captions": [f"{path}, line 1: 'a.png'"],
        "duplicate_pairs": [f"{path}, line 1: 'a.png' 'x'", f"{path}, line 2: 'b.png' 'x'"],
        "shared_image_ids": ["'1': 'a.png', 'b.png'"],
        "several_image_ids": ["'b.png': '2'", "'a.png': None"],
    }


def test_empty_captions_are_no_pairs_as_in_training(clean: Path) -> None:
    (clean / "rows.csv").write_text("image,caption,group\na.png, ,1\na.png,x,1\ngone.png,,2\n")
    report = check([clean / "rows.csv"], clean, group_id_key="group")
    table = converted([clean / "rows.csv"], root=clean, cache_dir=clean)
    assert (report["pairs"], report["images"]) == (len(table), table.meta["images"]) == (1, 1)
    assert report["groups"]["groups"] == 1 and not report["problems"]["missing_files"]
    assert len(report["problems"]["empty_captions"]) == 2


def test_problems_give_status_1_and_a_limited_summary(clean: Path, capsys) -> None:
    (clean / "bad.csv").write_text("pic,alt\n" + "".join(f"gone{i}.png,{i}\n" for i in range(15)))
    keys = ["--image-key", "pic", "--caption-key", "alt"]
    assert main(["check-data", f"{clean}/bad.csv", "--images", str(clean), *keys]) == 1
    printed = capsys.readouterr().out
    assert "15 missing image files" in printed and "and 5 more" in printed
    assert (
        main(["check-data", f"{clean}/bad.csv", "--images", str(clean), *keys, "--limit", "3"]) == 1
    )
    assert "3 missing image files" in capsys.readouterr().out
    (clean / "none.csv").write_text("image,caption\n")
    assert main(["check-data", f"{clean}/none.csv"]) == 1  # beside its pictures


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["gone.json", "--images", "."], "gone.json does not exist"),
        (["a.png", "--images", "."], "unknown suffix"),
        (["clean.json", "--images", "gone"], "gone does not exist"),
        (["clean.json", "--images", ".", "--workers", "0"], "at least 1"),
        (["clean.json", "--images", ".", "--json", "gone/out.json"], "folder that exists"),
    ],
)
def test_unusable_arguments_give_status_2(arguments, message, clean, monkeypatch, capsys) -> None:
    monkeypatch.chdir(clean)
    with pytest.raises(SystemExit) as stop:
        main(["check-data", *arguments])
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed.splitlines()[-1] and "usage:" not in printed


def test_vocabulary_can_be_loaded_by_bert_tokenizers(tmp_path: Path) -> None:
    captions = ["A Dog runs.", "two dogs run", "a café for dogs", "the zebra"]
    (tmp_path / "a.json").write_text(json.dumps([{"image": "a", "caption": captions}]))
    out = tmp_path / "vocab.txt"
    tokens = make_vocab([tmp_path / "a.json"], out, size=60)
    assert out.read_text("utf-8").splitlines() == tokens
    assert tokens[:5] == SPECIAL_TOKENS and len(set(tokens)) == len(tokens) <= 60
    assert all(token == token.lower() for token in tokens[5:])
    assert "dog" in tokens and "zebra" not in tokens  # zebra occurs only once
    assert os.listdir(tmp_path).count("vocab.txt") == 1 and len(os.listdir(tmp_path)) == 2
    tokenizer = build_tokenizer(str(out))
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 4)
    ids = tokenizer("Dogs run FOR a CAFÉ")["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids[1:-1]) == "dogs run for a cafe"
    assert make_vocab([tmp_path / "a.json"], out, size=60) == tokens


# Images inside other files


@pytest.mark.parametrize("storage", ["s.tar", "folder", "*.tar", "{s,s}.tar"])
def test_shards_are_checked(storage: str, clean: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(clean)
    a, b = ((clean / f"{name}.png").read_bytes() for name in "ab")
    samples = [(str(k), [a, b][k % 2], "png", f"caption {k}", {}) for k in range(3)]
    write_shards("folder", [*samples, ("3", b"no picture", "jpg", "caption", {})])
    shutil.copy("folder/pairs-000000.tar", "s.tar")
    if storage == "{s,s}.tar":  # given twice
        with pytest.raises(SystemExit):
            main(["check-data", storage])
        assert "given 2 times" in capsys.readouterr().err
        return
    assert main(["check-data", storage, "--vocab", "v.txt", "--vocab-size", "30"]) == 1
    printed = capsys.readouterr().out
    assert "pairs   4\nimages  4" in printed and "1 unreadable images" in printed
    assert "1 images with the content of another one" in printed
    assert "pairs-000000.tar, 3.jpg" in printed or "s.tar, 3.jpg" in printed
    assert "##n" in Path("v.txt").read_text().split() or "c" in Path("v.txt").read_text()


def stored_rows(clean: Path, rows: list[tuple[bytes | None, str, int]]) -> Path:
    """Write rows of image, caption and id into a parquet file."""
    table = pa.table(
        dict(zip(("image", "caption", "image_id"), zip(*rows, strict=True), strict=True))
    )
    pq.write_table(table, clean / "train.parquet")
    return clean / "train.parquet"


def test_images_inside_files_are_checked(clean: Path) -> None:
    a, b = ((clean / f"{name}.png").read_bytes() for name in "ab")
    save_noise_image(clean / "third.png", (31, 40))
    third = (clean / "third.png").read_bytes()
    rows = [(a, "one", 1), (b, "two", 2), (a, "three", 1), (a, "one", 1), (b, "...", 2)]
    rows += [(b[: len(b) // 2], "half", 3), (b"", "none", 4), (third, "small", 1), (None, "x", 5)]
    path = stored_rows(clean, rows)
    report = check([path], workers=2)
    found = {key: list_ for key, list_ in report["problems"].items() if list_}
    assert (report["pairs"], report["images"]) == (8, 4)
    assert [text.split("': ")[0] for text in found.pop("unreadable_images")] == [
        f"'{path}, row {row}" for row in (5, 6)
    ]
    (malformed,) = found.pop("malformed_rows")
    assert malformed.startswith(f"{path}, row 8: 'image': expected the path of an image file")
    assert found == {
        "empty_captions": [f"{path}, row 4: '{path}, row 1' '...'"],
        "duplicate_pairs": [f"{path}, row 3: '{path}, row 0' 'one'"],
        "shared_image_ids": [f"'1': '{path}, row 0', '{path}, row 7'"],
    }
    first = check([path], workers=2, limit=7)
    assert first["pairs"] == 7 and len(first["problems"]["unreadable_images"]) == 2


def test_a_folder_of_pictures_with_texts_needs_no_option(clean: Path, capsys) -> None:
    for name, text in {"a": "one two\none", "b": "one"}.items():
        (clean / f"{name}.txt").write_text(text)
    assert main(["check-data", str(clean), "--vocab", str(clean / "v.txt")]) == 0
    printed = capsys.readouterr().out
    assert "pairs   3\nimages  2\n" in printed and "no problems" in printed
    assert "files that belong to no sample: 1" in printed  # clean.json
    (clean / "b.png").write_bytes(b"none")
    assert main(["check-data", str(clean)]) == 1
    assert "1 unreadable images" in capsys.readouterr().out


# Groups


def write_groups(folder, groups, images=None):
    """Write one pair for each group; ``images`` are their names."""
    images = images or [f"{k}.png" for k in range(len(groups))]
    for k, name in enumerate(images):
        Image.new("RGB", (40, 40), (9 * k, 0, 0)).save(folder / name)
    rows = [
        {"image": image, "caption": f"picture {k}", "product": group}
        for k, (image, group) in enumerate(zip(images, groups, strict=True))
    ]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def checked(folder, groups, **options):
    return check([write_groups(folder, groups, **options)], folder, group_id_key="product")


def test_number_and_sizes_of_groups(tmp_path):
    report = checked(tmp_path, ["a", "b", 7, None, "b", "", "b", "c", "c", "d"])
    assert report["groups"] == {
        "groups": 5,
        "groups_with_several_images": 2,
        "pairs": 8,
        "share": 0.8,
    }
    text = "groups  5 of 8 pairs (80.0% of all), 2 of several images"
    assert text in render(report).splitlines()


def test_command_checks_the_column(tmp_path, capsys):
    path = write_groups(tmp_path, ["a", "a", "b", "c"])
    arguments = ["check-data", str(path), "--images", str(tmp_path)]
    assert main(arguments) == 0
    assert "groups" not in capsys.readouterr().out
    assert main([*arguments, "--group-id-key", "product"]) == 0
    assert "groups  3 of 4 pairs" in capsys.readouterr().out
    assert main([*arguments, "--group-id-key", "brand"]) == 1
    assert "no group_id column: 'brand' is in none of 4 records" in capsys.readouterr().out
    rows = path.read_text().replace('"product": "b"', '"product": ["b"]')
    path.write_text(rows)
    assert main([*arguments, "--group-id-key", "product"]) == 1
    out = capsys.readouterr().out
    assert "line 3: 'product': expected a string or an integer" in out and "got ['b']" in out
