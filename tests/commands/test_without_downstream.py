"""The room of downstream tasks is imported when LAVIS is asked for its names, and may be absent."""

from __future__ import annotations

import pytest
from fresh import fresh_python

# Importing the room fails, as if its folder had been removed.
WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("lavis_mafa.downstream"):
            raise ModuleNotFoundError(f"no {name}", name="lavis_mafa.downstream")

sys.meta_path.insert(0, Absent())
import lavis_mafa
from lavis.common.registry import registry
from lavis.models import model_zoo
from lavis_mafa.cli import main
from lavis_mafa.settings import ConfigError, load_config

assert registry.get_model_class("albef_vqa_mafa") is None
assert registry.get_task_class("mafa_vqa") is None and "mafa_pretrain" in registry.list_tasks()
assert {"albef_mafa", "albef_vqa"} <= set(dict(model_zoo))
assert "albef_vqa_mafa" not in str(model_zoo)
try:
    load_config("mafa/train/vqa_ft", machine=False)
except ConfigError as error:
    assert any("albef_vqa_mafa" in problem for problem in error.problems)
else:
    raise AssertionError("a config of downstream tasks was accepted")
assert not main(["train", "--cfg-path", "albef_toy", "--options", *sys.argv[1:]])
"""
ON_DEMAND = """
import sys
from in_forks import failures
import lavis_mafa
from lavis.common.registry import registry
from lavis.models import load_model, model_zoo

room = "lavis_mafa.downstream"
assert registry.get_model_class("albef_mafa") and registry.get_builder_class("toy_scenes")
assert "albef_vqa_mafa" not in registry.mapping["model_name_mapping"] and room not in sys.modules
then = '''
assert room in sys.modules
assert registry.get_task_class("mafa_vqa").__module__.startswith(room)
'''
failed = failures([ask + then for ask in sys.argv[1:]], globals())  # nobody has asked before
assert not failed, failed
"""


def test_the_core_lists_checks_and_trains_without_the_room(tmp_path):
    info = "datasets.toy_scenes.build_info"
    sizes = [f"{info}.{name}_size=16" for name in ("train", "val", "test")]
    sizes += ["run.grit.queue_size=8", "run.grit.search_space=8", "run.batch_size_train=8"]
    options = [*sizes, "run.max_steps=2", "run.job_id=job", "run.loggers=[]"]
    options += ["model.mafa.con_d.arch=oracle", "run.k_test=4"]
    fresh_python("-c", WITHOUT, *options, folder=tmp_path)
    assert (tmp_path / "output/albef_toy/job/checkpoint_last.pth").is_file()


@pytest.mark.downstream
def test_the_room_is_imported_when_a_name_is_asked_for(tmp_path):
    fresh_python(
        "-c",
        ON_DEMAND,
        'assert load_model("albef_ve_mafa", "tiny") is not None',
        'assert registry.get_builder_class("refcoco_plus") is not None',
        'assert registry.get_task_class("nothing") is None',
        'assert ("albef_ve_mafa", ["ve", "tiny"]) in list(model_zoo) and len(model_zoo) > 80',
        folder=tmp_path,
    )
