"""Check the identity file of a folder: recorded, checked, and read under its old name."""

from __future__ import annotations

import json

import pytest

from lavis_mafa.io.identity import IDENTITY_FILE, OLD_IDENTITY_FILE, check_identity, claim_folder

IDENTITY = {"model": "a", "data": "b"}


def test_claimed_folder_is_accepted_again(tmp_path):
    claim_folder(tmp_path / "kept", IDENTITY)
    assert json.loads((tmp_path / "kept" / "identity.json").read_text()) == IDENTITY
    claim_folder(tmp_path / "kept", IDENTITY)


@pytest.mark.parametrize("name", [IDENTITY_FILE, OLD_IDENTITY_FILE])
def test_another_identity_is_rejected_under_both_file_names(tmp_path, name):
    (tmp_path / name).write_text(json.dumps(IDENTITY))
    check_identity(tmp_path, IDENTITY)
    with pytest.raises(ValueError, match="something else .data: b recorded, c expected.*remove"):
        check_identity(tmp_path, {**IDENTITY, "data": "c"})
    (tmp_path / name).write_text("{")
    with pytest.raises(ValueError, match=f"{name} is damaged.*remove that folder"):
        check_identity(tmp_path, IDENTITY)


def test_new_file_is_read_before_an_old_one(tmp_path):
    (tmp_path / OLD_IDENTITY_FILE).write_text(json.dumps({"model": "old"}))
    (tmp_path / IDENTITY_FILE).write_text(json.dumps(IDENTITY))
    check_identity(tmp_path, IDENTITY)
