"""Models by the id of a hub: huggingface_hub itself, against a server of this test's that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

SHA = "0123456789abcdef0123456789abcdef01234567"
ID = "somebody/tiny-llama"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two blocks, as it lies on the hub; with a file that nobody asks for."""
    folder = tmp_path_factory.mktemp("hub") / "files"
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "modeling.py").write_text("raise SystemExit('code of the hub was run')\n")
    return folder


@pytest.fixture(scope="module")
def hub(model: Path) -> Iterator[tuple[str, list[str]]]:
    """(address, names of files asked for) of a hub that has this one model."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def answer(self, code: int, content: bytes, **headers: str) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if path.startswith(f"/api/models/{ID}/tree/"):
                files = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": file.name}
                    for file in model.iterdir()
                ]
                self.answer(200, json.dumps(files).encode(), Content_Type="application/json")
            elif path.startswith(f"/api/models/{ID}"):
                files = [{"rfilename": file.name} for file in sorted(model.iterdir())]
                told = {"id": ID, "modelId": ID, "sha": SHA, "siblings": files, "private": False, "tags": []}
                self.answer(200, json.dumps(told).encode(), Content_Type="application/json")
            elif path.startswith(f"/{ID}/resolve/{SHA}/"):
                name = path.rsplit("/", 1)[1]
                content = (model / name).read_bytes()
                asked.append(name)
                self.answer(200, content, ETag=f'"{hashlib.sha256(content).hexdigest()}"', X_Repo_Commit=SHA)
            else:
                self.answer(404, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


def call(address: str, cache: Path, *words: object, fails: bool = False) -> tuple[str, str]:
    """What the command line prints and says beside it, in a process of its own.

    huggingface_hub reads the environment when it is imported.
    """
    environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "fp8engine", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout, " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_model_is_downloaded_and_later_taken_from_the_cache(hub: tuple[str, list[str]], tmp_path: Path):
    address, asked = hub
    cache, closed = tmp_path / "cache", "http://127.0.0.1:9"  # nobody listens at port 9
    words = ("inspect", ID, "-r", "current", "--json")
    shown, said = call(address, cache, *words)
    told = json.loads(shown)
    assert (told["class"], told["totals"]["converted"]) == ("LlamaForCausalLM", 14)
    assert set(asked) == {"config.json"}  # no weights for sizes
    assert "cannot be reached" not in said
    without, said = call(closed, cache, *words)
    assert json.loads(without) == told
    assert f"{ID}: the Hugging Face hub cannot be reached; read from the local cache, {cache}" in said
    _, said = call(closed, tmp_path / "empty", "inspect", ID, fails=True)
    assert f"'{ID}' is neither a folder that exists nor module:function" in said
    assert "nor in the local cache" in said


@pytest.mark.slow
def test_weights_of_a_hub_are_compared_and_exported(hub: tuple[str, list[str]], tmp_path: Path):
    address, asked = hub
    asked.clear()
    (tmp_path / "text.txt").write_text("one paragraph\n\nand another\n")
    words = ("--tokenizer", "bytes", "--text", tmp_path / "text.txt", "-r", "current", "--out", tmp_path / "report")
    call(address, tmp_path / "cache", "compare", ID, *words)
    assert {"config.json", "model.safetensors"} <= set(asked)
    assert "modeling.py" not in asked
    call(address, tmp_path / "cache", "export", ID, tmp_path / "out", "-r", "current")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_what_is_no_model_of_the_hub_is_named(hub: tuple[str, list[str]], tmp_path: Path):
    _, said = call(hub[0], tmp_path, "inspect", "somebody/nothing", fails=True)
    assert "'somebody/nothing' is neither a folder that exists nor module:function, nor a model" in said
    assert "Traceback" not in said
