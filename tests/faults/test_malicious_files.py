"""A file that would run code when unpickled is rejected wherever files are read, and its code
never runs.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import lavis_mafa
from lavis_mafa.config import ConfigError, load_config
from lavis_mafa.io.checkpoints import read_checkpoint
from lavis_mafa.io.checksums import is_intact

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "projects/mafa/train"


class Malicious:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


class MaliciousEval:
    """Like `Malicious`, but by a call that torch might consider harmless."""

    def __init__(self, folder):
        self.code = f"__import__('os').mkdir({str(folder)!r})"

    def __reduce__(self):
        return eval, (self.code,)


def torch_zip(path, bomb):
    torch.save({"model": {"weight": torch.ones(2), "extra": bomb}}, path)


def torch_old(path, bomb):
    torch.save({"model": bomb}, path, _use_new_zipfile_serialization=False)


def plain_pickle(path, bomb):
    path.write_bytes(pickle.dumps({"model": bomb}, protocol=2))


def newer_pickle(path, bomb):
    path.write_bytes(pickle.dumps(bomb, protocol=4))


def objects_npy(path, bomb):
    with open(path, "wb") as file:
        np.save(file, np.array([bomb, None], object), allow_pickle=True)


FORMS = [torch_zip, torch_old, plain_pickle, newer_pickle, objects_npy]


def runs_code(path):
    """Open a file without any protection; some of the attempts run its code."""
    for load in (
        lambda: torch.load(path, weights_only=False),
        lambda: pickle.loads(path.read_bytes()),
        lambda: [np.load(path, allow_pickle=True)[name] for name in ("errors", "about")],
        lambda: np.load(path, allow_pickle=True),
    ):
        try:
            load()
        except Exception:
            pass


class MaliciousFile:
    """A malicious file, and a mark that exists if its code ran."""

    def __init__(self, folder: Path, form=torch_zip, name="evil.pth", bomb=Malicious) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.mark = folder / name, folder / "it_ran"
        form(self.path, bomb(self.mark))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs_code(self.path)
        assert self.mark.is_dir(), "the file of this test must be harmful"
        self.mark.rmdir()

    def assert_rejected(self, message, injected, reader: str) -> None:
        assert not self.mark.exists(), f"{reader}: its code ran"
        assert str(self.path) in str(message), f"{reader}: the file is not named in {message}"
        injected("malicious file", 1)


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def malicious(request, tmp_path):
    return MaliciousFile(tmp_path / "evil", request.param)


@pytest.fixture
def malicious_zip(tmp_path):
    return MaliciousFile(tmp_path / "evil")


# Reading


@pytest.mark.strict_smoke
@pytest.mark.parametrize("bomb", [Malicious, MaliciousEval])
@pytest.mark.parametrize("mapped", [False, True])
def test_read_checkpoint_rejects_malicious_files(tmp_path, injected, mapped, bomb):
    for form in FORMS:
        world = MaliciousFile(tmp_path / form.__name__, form, bomb=bomb)
        with pytest.raises(ValueError, match="cannot be loaded") as caught:
            read_checkpoint(str(world.path), mapped)
        world.assert_rejected(caught.value, injected, f"read_checkpoint of {form.__name__}")
        is_intact(world.path)
        assert not world.mark.exists()


def test_message_names_the_code_and_recommends_no_unsafe_loading(tmp_path):
    for form in (torch_zip, torch_old, plain_pickle):
        world = MaliciousFile(tmp_path / form.__name__, form)
        with pytest.raises(ValueError) as caught:
            read_checkpoint(str(world.path))
        message = str(caught.value)
        assert "posix.mkdir, which is code" in message or "nt.mkdir, which is code" in message
        assert "weights_only" not in message and "\x1b" not in message


# Configs

# By key: config, and the settings with which the key is read.
KEYS = {
    "model.pretrained": ("albef_toy", {"model.load_pretrained": True}),
    "model.finetuned": ("albef_toy", {"model.load_finetuned": True}),
    "model.mafa.con_d.checkpoint": (
        "albef_toy",
        {"model.mafa.con_d.arch": "albef_mafa", "model.mafa.con_d.model_type": "tiny"},
    ),
    "model.mafa.con_d.model.vit_weights": (
        "albef_toy",
        {
            "model.mafa.con_d.arch": "blip2_mafa",
            "model.mafa.con_d.model_type": "pretrain",
        },
    ),
    "run.resume_ckpt_path": ("albef_toy", {}),
    "model.vit_weights": ("blip2_toy", {}),
}
# The same keys in other families, LAVIS's own models and its runner.
OTHERS = [
    ("model.pretrained", "blip_toy", {"model.load_pretrained": True}),
    ("model.finetuned", "blip2_toy", {"model.load_finetuned": True}),
    ("model.pretrained", "fne_toy", {"model.load_pretrained": True}),
    ("model.pretrained", "vqa_ft_toy", {"model.load_pretrained": True}),
    ("model.pretrained", "nlvr_toy", {"model.load_pretrained": True}),
    ("run.resume_ckpt_path", "fne_toy", {}),
    (
        "run.resume_ckpt_path",
        "albef_toy",
        {"run.runner": "runner_base", **{"run.grit.enabled": False}},
    ),
]
LAVIS = [
    ("albef_retrieval", "coco"),
    ("albef_pretrain", "base"),
    ("blip_retrieval", "coco"),
    ("blip_pretrain", "base"),
    ("blip2", "pretrain"),
]


def options(given):
    return [f"{key}={value}" for key, value in given.items()]


def assert_config_rejected(world, injected, key, config, more):
    with pytest.raises(ConfigError) as caught:
        load_config(TRAIN / f"{config}.yaml", options({**more, key: world.path}))
    lines = [line for line in caught.value.problems if line.startswith(f"{key}: ")]
    assert lines, caught.value
    world.assert_rejected(lines[0], injected, key)


@pytest.mark.strict_smoke
@pytest.mark.parametrize("key", KEYS)
def test_keys_of_a_config_reject_malicious_files(malicious, injected, key):
    assert_config_rejected(malicious, injected, key, *KEYS[key])


@pytest.mark.parametrize("key, config, more", OTHERS)
def test_keys_of_other_families_reject_malicious_files(malicious_zip, injected, key, config, more):
    assert_config_rejected(malicious_zip, injected, key, config, more)


@pytest.mark.parametrize("kind", ["pretrained", "finetuned"])
@pytest.mark.parametrize("arch, model_type", LAVIS)
def test_lavis_models_reject_malicious_files(
    malicious_zip, injected, arch, model_type, kind, monkeypatch
):
    """LAVIS's loading relies on torch's default, which an environment variable can change."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    more = {"model.arch": arch, "model.model_type": model_type, "run.grit.enabled": False}
    more |= {f"model.load_{kind}": True, "model.mafa": "null"}
    assert_config_rejected(malicious_zip, injected, f"model.{kind}", "albef_toy", more)


def test_clip_rejects_malicious_files(malicious_zip, injected):
    """For CLIP, `pretrained` is a tag or a file."""
    more = {"model.arch": "clip", "model.model_type": "ViT-B-32", "run.grit.enabled": False}
    assert_config_rejected(malicious_zip, injected, "model.pretrained", "albef_toy", more)


@pytest.mark.parametrize("key", ["model.bert_weights", "model.opt_model"])
def test_hugging_face_folders_reject_malicious_files(tmp_path, injected, key):
    world = MaliciousFile(tmp_path / "folder", name="pytorch_model.bin")
    (tmp_path / "folder/config.json").write_text(json.dumps({"model_type": "bert"}))
    config = {"model.bert_weights": "blip2_toy", "model.opt_model": "blip2_stage2_toy"}[key]
    with pytest.raises(ConfigError) as caught:
        load_config(TRAIN / f"{config}.yaml", [f"{key}={tmp_path / 'folder'}"])
    lines = [line for line in caught.value.problems if line.startswith(f"{key}: ")]
    world.assert_rejected(lines, injected, key)


def test_order_of_the_first_epoch_rejects_malicious_files(tmp_path, injected):
    world = MaliciousFile(tmp_path / "evil", objects_npy, "order.npy")
    assert_config_rejected(world, injected, "run.grit.first_order", "albef_toy", {})
    numbers = tmp_path / "evil" / "numbers.npy"
    numbers.write_bytes(pickle.dumps(Malicious(world.mark)))
    world.path = numbers
    assert_config_rejected(world, injected, "run.grit.first_order", "albef_toy", {})


def test_config_file_cannot_run_code(tmp_path):
    """YAML can name Python objects."""
    mark = tmp_path / "it_ran"
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: !!python/object/apply:os.mkdir ['{mark}']\nmodel: {{}}\ndatasets: {{}}\n"
    )
    with pytest.raises(ConfigError, match="config.yaml"):
        load_config(path)
    with pytest.raises(ConfigError):
        load_config(TRAIN / "albef_toy.yaml", [f"run.x=!!python/object/apply:os.mkdir ['{mark}']"])
    assert not mark.exists()


# Other ways of loading


def test_loading_functions_reject_malicious_files(malicious, injected):
    from lavis_mafa.models.con_d.build import build_discriminator

    path = str(malicious.path)
    tries = {
        "load_model": lambda: lavis_mafa.load_model("albef_mafa", "tiny", checkpoint=path),
        "build_discriminator": lambda: build_discriminator(
            {"arch": "blip_mafa", "model_type": "tiny", "checkpoint": path}
        ),
    }
    for name, build in tries.items():
        with pytest.raises(ValueError, match="cannot be loaded") as caught:
            build()
        malicious.assert_rejected(caught.value, injected, name)


def test_lavis_own_loading_uses_weights_only(malicious_zip, tiny):
    """Independent of this package: torch's default is weights only, in both sets of packages."""
    from lavis.models.albef_models import AlbefBase
    from lavis.models.base_model import BaseModel
    from lavis.models.blip2_models.blip2 import Blip2Base
    from lavis.models.blip_models.blip import BlipBase

    for load in (
        lambda: BaseModel.load_checkpoint(tiny, str(malicious_zip.path)),
        lambda: AlbefBase.load_from_pretrained(tiny, str(malicious_zip.path)),
        lambda: BlipBase.load_from_pretrained(tiny, str(malicious_zip.path)),
        lambda: Blip2Base.load_from_pretrained(tiny, str(malicious_zip.path)),
    ):
        with pytest.raises(pickle.UnpicklingError):
            load()
        assert not malicious_zip.mark.exists()


def test_hugging_face_weights_are_rejected(tmp_path, injected):
    """from_pretrained of a folder, without the check of configs."""
    from lavis_mafa.models.families.blip2.blip2_parts import QFormer, load_image_encoder
    from lavis_mafa.models.parts.tokenizers import from_hub

    world = MaliciousFile(tmp_path / "folder", name="pytorch_model.bin")
    config = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 9}
    (tmp_path / "folder/config.json").write_text(json.dumps(config))
    with pytest.raises((OSError, pickle.UnpicklingError)) as caught:
        from_hub(QFormer.from_pretrained, str(tmp_path / "folder"))
    assert not world.mark.exists(), caught.value
    with pytest.raises(ValueError) as assert_rejected:
        load_image_encoder(torch.nn.Linear(1, 1), str(world.path))
    world.assert_rejected(assert_rejected.value, injected, "load_image_encoder")


# Commands


def output_of_failure(capfd, caplog, action):
    """Run a command that must fail; return its output."""
    with caplog.at_level("INFO"):
        status = action()
    streams = capfd.readouterr()
    output = streams.out + streams.err + caplog.text
    assert status not in (0, None), output
    return output


@pytest.mark.parametrize("form", [torch_zip, torch_old], ids=lambda form: form.__name__)
@pytest.mark.parametrize(
    "command",
    [
        "train",
        "evaluate",
        "export hf",
        "export albef_vqa",
        "research vision",
        "count",
        "count con_d",
        "mine",
    ],
)
def test_commands_reject_malicious_checkpoints(tmp_path, injected, capfd, caplog, command, form):
    from lavis_mafa.cli import main
    from lavis_mafa.cli import main as analysis
    from research.__main__ import main as research

    world = MaliciousFile(tmp_path / "evil", form)
    config = ["--cfg-path", str(TRAIN / "albef_toy.yaml")]
    malicious_path, out = str(world.path), str(tmp_path / "out")
    finetuned = [
        "model.load_finetuned=True",
        f"model.finetuned={malicious_path}",
        f"run.output_dir={out}",
    ]
    output = [*config, "--output", out]
    judge = ["a.arch=albef_mafa", "a.model_type=tiny", f"a.checkpoint={malicious_path}"]
    tries = {
        "train": lambda: main(["train", *config, "--options", *finetuned]),
        "evaluate": lambda: main(["evaluate", *config, "--options", *finetuned]),
        "export hf": lambda: main(
            ["export", malicious_path, out, "--to", "hf", "--arch", "blip2_mafa"]
        ),
        "export albef_vqa": lambda: main(["export", malicious_path, out, "--to", "albef_vqa"]),
        "research vision": lambda: research(
            ["vision", *output, "--checkpoint", f"a={malicious_path}"]
        ),
        "count": lambda: analysis(["count", *output, "--checkpoint", malicious_path]),
        "count con_d": lambda: analysis(["count", *output, "--con-d", *judge]),
        "mine": lambda: analysis(["mine", *output, "--con-d", *judge]),
    }
    message = output_of_failure(capfd, caplog, tries[command])
    world.assert_rejected(message, injected, command)


def objects_npz(path, bomb):
    with open(path, "wb") as file:
        array = np.array([bomb, None], object)
        columns = ("image", "text", "from_image", "from_text", "truth", "probability_a")
        scores = ("scores_i2t", "scores_t2i", "images", "captions", "image_of")
        names = (*columns, *scores, "about", "errors")
        np.savez(file, **dict.fromkeys(names, array), allow_pickle=True)


@pytest.mark.parametrize("form", [objects_npz, objects_npy, plain_pickle], ids=lambda f: f.__name__)
@pytest.mark.parametrize("command", ["threshold", "label", "eccv"])
def test_commands_reject_malicious_arrays(tmp_path, injected, capfd, caplog, command, form):
    from lavis_mafa.cli import main as analysis

    world = MaliciousFile(tmp_path / "evil", form, "judged.npz")
    page = ["--output", str(tmp_path / "labels.html")]
    tries = {
        "threshold": lambda: analysis(["threshold", str(world.path)]),
        "label": lambda: analysis(["label", "page", str(world.path), *page]),
        "eccv": lambda: analysis(["eccv", str(world.path)]),
    }
    message = output_of_failure(capfd, caplog, tries[command])
    world.assert_rejected(message, injected, command)


def test_cached_tables_never_load_objects(tmp_path, injected):
    """The caches of converted data sets are numeric; object arrays are not loaded."""
    from lavis_mafa.datasets.pair_conversion import converted
    from lavis_mafa.datasets.pair_table import PairTable

    pairs = [{"image": f"{k}.png", "caption": f"picture {k}"} for k in range(3)]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    table = converted([tmp_path / "pairs.json"], cache_dir=tmp_path / "cache")
    world = MaliciousFile(Path(table.folder), objects_npy, "image_ids.npy")
    assert isinstance(table, PairTable)
    fresh = converted([tmp_path / "pairs.json"], cache_dir=tmp_path / "cache")
    try:
        assert fresh.image_ids.tolist() == [0, 1, 2]  # created again
    except (ValueError, OSError):
        pass
    assert not world.mark.exists()


def test_train_script_rejects_malicious_checkpoints(tmp_path, injected):
    """The real script: status 2, nothing built, even with the variable that makes torch unsafe."""
    world = MaliciousFile(tmp_path / "evil")
    run_options = ["model.load_pretrained=True", f"model.pretrained={world.path}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    command = [sys.executable, ROOT / "train.py", "--cfg-path", TRAIN / "albef_toy.yaml"]
    process = subprocess.run(
        [*command, "--options", *run_options, f"run.output_dir={tmp_path / 'out'}"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2 and "model.pretrained: " in process.stderr, process.stderr[
        -2000:
    ]
    world.assert_rejected(process.stderr, injected, "train.py")
    assert not (tmp_path / "out").exists()


# No unsafe loading in our code

LOADS = {"load", "loads", "load_file", "read_pickle", "unsafe_load", "full_load", "load_all"}
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}


def unsafe_loads(text: str) -> list[str]:
    """Return the calls in a program that could run code from a file."""
    found = []
    tree = ast.parse(text)
    names = {}  # the full name behind each name in the program
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({a.asname or a.name.split(".")[0]: a.name for a in node.names})
        elif isinstance(node, ast.ImportFrom):
            names.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    for name in names.values():
        if name.split(".")[0] in UNSAFE and name != "pickle.UnpicklingError":
            found.append(f"import {name}")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        root, _, rest = called.partition(".")
        called = f"{names.get(root, root)}.{rest}".rstrip(".")
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        module, _, function = called.rpartition(".")
        if called == "torch.load" and given.get("weights_only") != "True":
            found.append(ast.unparse(node))
        elif module == "numpy" and given.get("allow_pickle", "False") != "False":
            found.append(ast.unparse(node))
        elif called in ("numpy.load", "numpy.lib.format.read_array") and len(node.args) > 2:
            found.append(ast.unparse(node))
        elif called in ("torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"):
            found.append(ast.unparse(node))
        elif function in LOADS and module in ("yaml", "pandas", "lavis.common.utils"):
            found.append(ast.unparse(node))
        elif given.get("trust_remote_code", "False") != "False":
            found.append(ast.unparse(node))
        elif called in ("eval", "exec", "builtins.eval", "builtins.exec"):
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.load(p)",
        "import torch\ntorch.load(p, weights_only=False)",
        "import torch\ntorch.load(p, weights_only=safe)",
        "from torch import load as read\nread(p)",
        "import numpy as np\nnp.load(p, allow_pickle=True)",
        "import numpy\nnumpy.load(p, None, True)",
        "import pickle\npickle.load(f)",
        "from joblib import load",
        "import yaml\nyaml.load(f, Loader=yaml.Loader)",
        "import torch\ntorch.jit.load(p)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_unsafe_calls_are_found(text):
    assert len(unsafe_loads(text)) == 1


def test_our_code_has_no_unsafe_loading():
    files = [*(ROOT / "lavis_mafa").rglob("*.py"), *(ROOT / "projects").rglob("*.py")]
    files += [*(ROOT / "research").rglob("*.py"), *ROOT.glob("*.py")]
    files.remove(ROOT / "setup.py")  # executes _version.py
    assert len(files) > 150
    found = {path: unsafe_loads(path.read_text(encoding="utf-8")) for path in files}
    assert {str(path): calls for path, calls in found.items() if calls} == {}
