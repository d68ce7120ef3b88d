"""Push an exported folder by the real client to a stand-in of the hub's API."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

pytest.importorskip("safetensors")
import transformers

if not hasattr(transformers, "Blip2ForImageTextRetrieval"):
    pytest.skip("transformers is too old for this export", allow_module_level=True)

from conftest import ROOT
from omegaconf import OmegaConf

from lavis_mafa import load_model
from lavis_mafa.runners.checkpoint import trained_state

TOKEN = "hf_right"
CHECK = """
import sys
from lavis_mafa.export.push import PushError, require_hub
try:
    require_hub(sys.argv[1])
except PushError as error:
    print(error)
assert "torch" not in sys.modules, "slow"
"""

# One process: importing LAVIS takes longest.
EXPORTS = """
import os, sys
from lavis_mafa.cli import main
def export(name, *more):
    arguments = [sys.argv[1], f"{sys.argv[2]}/{name}", "--to", "hf", *more]
    return main(["export", *arguments])
status = [export("first", "--push", "me/model", "--private"), export("second", "--push", "me/full")]
del os.environ["HF_TOKEN"]
print(*status, export("third", "--push", "me/model"))
"""


class Hub(ThreadingHTTPServer):
    """Knows one user, keeps what is uploaded to ``me/model``, and refuses all else.

    Attributes:
        asked: methods and paths of all requests.
        created: content of the requests that create a repository.
        files: uploaded files by name.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked, self.created, self.files = [], [], {}

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.asked.append(f"GET {self.path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "no"}, 401)
        elif self.path == "/api/whoami-v2":
            self._answer({"type": "user", "name": "me", "orgs": []})
        else:
            self._answer({}, 404)

    def do_POST(self):
        self.server.asked.append(f"POST {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "no"}, 401)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            name = f"me/{self.server.created[-1]['name']}"
            self._answer({"url": f"{self.server.url}/{name}", "name": name, "id": name})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            names = [one["path"] for one in json.loads(body)["files"]]
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            self._answer({"files": [{"path": name, **regular} for name in names]})
        elif self.path == "/api/models/me/model/commit/main":
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.files[line["value"]["path"]] = content
            url = f"{self.server.url}/me/model/commit/{'0' * 40}"
            self._answer({"success": True, "commitOid": "0" * 40, "commitUrl": url})
        else:
            self._answer({"error": "full"}, 507)

    def _answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def run(arguments, home, endpoint, token=TOKEN, **more):
    """Run Python in a process that has no token but the given one; return it when it has ended."""
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), **more}
    env |= {"HF_TOKEN": token} if token else {}
    env["HF_HUB_DISABLE_XET"] = "1"
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=home)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = load_model("blip_mafa", "tiny")
    cfg = OmegaConf.to_container(OmegaConf.load(model.default_config_path("tiny")).model)
    path = tmp_path_factory.mktemp("blip") / "blip.pth"
    torch.save({"model": trained_state(model), "config": {"model": cfg}}, path)
    return path


def test_folder_is_uploaded_or_kept(hub, checkpoint, tmp_path):
    done = run(["-c", EXPORTS, checkpoint, tmp_path], tmp_path, hub.url)
    assert done.stdout.splitlines()[-1] == "0 1 1", done.stderr
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert f"pushed to {hub.url}/me/model" in done.stdout
    assert [one["name"] for one in hub.created] == ["model", "full"]
    # Newer clients say it by another name.
    private = [one.get("private") or one.get("visibility") == "private" for one in hub.created]
    assert private == [True, False]
    assert hub.files == {file.name: file.read_bytes() for file in first.iterdir()}
    assert {"README.md", "config.json", "model.safetensors"} <= hub.files.keys()
    first_asked = hub.asked.index("GET /api/whoami-v2")
    assert first_asked < hub.asked.index("POST /api/repos/create"), "the token is checked first"
    # A failed upload keeps the folder.
    assert (
        f"push failed, {second} is complete: --push me/full: {hub.url} gives an error"
        in done.stderr
    )
    assert (second / "model.safetensors").is_file()
    # Without a token nothing is exported.
    assert "export failed: --push me/model: no token" in done.stderr and not third.exists()
    assert TOKEN not in done.stdout + done.stderr


def test_what_the_hub_needs_is_checked_first(hub, tmp_path):
    def said(repository, endpoint=hub.url, **more):
        return run(["-c", CHECK, repository], tmp_path, endpoint, **more).stdout

    assert said("me/model") == ""
    assert "no token of the hub was found; run `hf auth login`" in said("me/model", token=None)
    assert "an error (401)" in said("me/model", token="hf_wrong")
    assert "HF_HUB_OFFLINE" in said("me/model", HF_HUB_OFFLINE="1")
    assert "no answer" in said("me/model", endpoint="http://127.0.0.1:9")
    for name in ("model", "me/../model", "https://hub/me"):
        assert "expected USER/NAME" in said(name)
