"""Groups in ``lavis-mafa check-data``."""

from __future__ import annotations

import json

from PIL import Image

from lavis_mafa.cli import main
from lavis_mafa.data.data_check import check, render


def write(folder, groups, images=None):
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
    return check([write(folder, groups, **options)], folder, group_id_key="product")


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
    path = write(tmp_path, ["a", "a", "b", "c"])
    arguments = ["check-data", str(path), "--image-root", str(tmp_path)]
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
    assert "line 3: 'product': expected a string or an integer, got ['b']" in out
