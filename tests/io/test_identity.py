"""Check the identity file of a folder: recorded and checked."""

from __future__ import annotations

import json

import pytest

from lavis_mafa.io.identity import IDENTITY_FILE, check_identity, claim_folder

IDENTITY = {"model": "a", "data": "b"}


def test_claimed_folder_is_accepted_again(tmp_path):
    claim_folder(tmp_path / "kept", IDENTITY)
    assert json.loads((tmp_path / "kept" / "identity.json").read_text()) == IDENTITY
    claim_folder(tmp_path / "kept", IDENTITY)


def test_another_identity_is_rejected(tmp_path):
    name = IDENTITY_FILE
    (tmp_path / name).write_text(json.dumps(IDENTITY))
    check_identity(tmp_path, IDENTITY)
    with pytest.raises(ValueError, match="something else .data: b recorded, c expected.*remove"):
        check_identity(tmp_path, {**IDENTITY, "data": "c"})
    (tmp_path / name).write_text(json.dumps({"model": "a"}))
    with pytest.raises(ValueError, match="data: None recorded, b expected"):
        check_identity(tmp_path, IDENTITY)
    (tmp_path / name).write_text("{")
    with pytest.raises(ValueError, match=f"{name} is damaged.*remove that folder"):
        check_identity(tmp_path, IDENTITY)
