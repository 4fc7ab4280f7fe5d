import collections
import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading

import pytest

from areal_jax import hub

ROOT = pathlib.Path(__file__).parents[1]
MODEL = ROOT / "configs" / "arithmetic_model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def ask(path, home, **environment):
    """What `model_directory` says in a process of its own: (the directory, "") or ("", the error with its type)."""
    code = (
        "import sys; from areal_jax import hub\n"
        "try: print(hub.model_directory(sys.argv[1]))\n"
        "except (OSError, ValueError) as error: sys.exit(f'{type(error).__name__}: {error}')"
    )
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(("HF_", "HUGGING"))}
    environment = {**kept, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "*", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment
    )
    return done.stdout.strip(), done.stderr.strip().split("\n")[-1]


def fill_cache(home, *, without=()):
    """A cache in the hub's own layout that holds the model org/tiny at `main`."""
    repo = home / "hub" / "models--org--tiny"
    snapshot = repo / "snapshots" / COMMIT
    shutil.copytree(MODEL, snapshot)
    for name in without:
        (snapshot / name).unlink()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.fixture
def need_package():
    pytest.importorskip("huggingface_hub", reason="pip install huggingface_hub")


@pytest.fixture
def closed_endpoint(unused_port):
    return f"http://127.0.0.1:{unused_port}"


def test_a_local_directory_is_returned_as_it_is(tmp_path):
    assert hub.model_directory(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "~/nowhere", "a/b/c", "nowhere"])
def test_a_local_directory_that_is_not_there_is_never_looked_for_on_the_hub(path):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        hub.model_directory(path)


def test_a_file_is_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").write_text("")
    with pytest.raises(FileNotFoundError, match="model.path=org/name is a file; .*--config.model.path=org$"):
        hub.model_directory("org/name")


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    assert hub.find_model("org/name") is None
    with pytest.raises(ValueError, match="pip install huggingface_hub"):
        hub.model_directory("org/name")


@pytest.mark.parametrize("path", ["org/tiny", "org/tiny@main", f"org/tiny@{COMMIT}"])
def test_what_the_cache_has_needs_no_network(tmp_path, need_package, closed_endpoint, path):
    snapshot = fill_cache(tmp_path)
    assert ask(path, tmp_path, HF_ENDPOINT=closed_endpoint) == (str(snapshot), "")
    assert ask(path, tmp_path, HF_HUB_OFFLINE="1") == (str(snapshot), "")


def test_without_network_and_cache_the_error_says_what_was_looked_for_where_and_what_to_do(
    tmp_path, need_package, closed_endpoint
):
    found, error = ask("org/tiny@v2", tmp_path, HF_ENDPOINT=closed_endpoint)
    assert not found
    for part in (
        "FileNotFoundError: model.path=org/tiny@v2: no such directory here",
        "ConnectError",
        "Looked for the revision v2",
        str(tmp_path / "hub"),
        closed_endpoint,
        "hf download org/tiny --revision v2 --local-dir DIR",
        "--config.model.path=DIR",
        "HF_TOKEN",
    ):
        assert part in error
    assert "HF_HUB_OFFLINE" not in error


def test_the_error_says_when_the_network_is_forbidden(tmp_path, need_package):
    found, error = ask("org/tiny", tmp_path, HF_HUB_OFFLINE="1")
    assert not found
    assert "HF_HUB_OFFLINE forbids the network" in error


def test_a_cache_without_weights_is_no_model(tmp_path, need_package, closed_endpoint):
    snapshot = fill_cache(tmp_path, without=["model.safetensors"])
    found, error = ask("org/tiny", tmp_path, HF_ENDPOINT=closed_endpoint)
    assert not found
    assert f"{snapshot} lacks *.safetensors" in error


def test_every_shard_that_the_index_names_must_be_there(tmp_path):
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / hub.INDEX).write_text(json.dumps({"weight_map": shards}))
    assert hub.missing_files(tmp_path) == ["model-00002-of-00002.safetensors"]


# A hub on loopback, as far as the package asks one.

FILES = {path.name: path.read_bytes() for path in MODEL.iterdir()} | {
    "pytorch_model.bin": b"no",
    "model.gguf": b"no",
    "consolidated.safetensors": b"no",
    "original/consolidated.00.safetensors": b"no",
    "chat_template.jinja": b"{{ messages[0].content }}",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """org/tiny is there, org/gated needs terms to be accepted, of anything else nothing is known."""

    def do_GET(self):
        self.server.asked.append((self.command, self.path))
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/gated"):
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "no"})
        if path in (f"/api/models/org/tiny/revision/{name}" for name in ("main", COMMIT)):
            return self.answer(200, json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": []}).encode())
        if path == f"/api/models/org/tiny/tree/{COMMIT}":
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": f"{abs(hash(name)):040x}"[:40]}
                for name, content in FILES.items()
            ]
            return self.answer(200, json.dumps(listed).encode())
        name = path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
        if name in FILES:
            return self.answer(200, FILES[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{abs(hash(name)):040x}"'})
        code = "RevisionNotFound" if path.startswith("/api/models/org/tiny/revision") else "RepoNotFound"
        return self.answer(404, b"{}", {"X-Error-Code": code})

    do_HEAD = do_GET

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def fake_hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_takes_what_a_model_needs_and_nothing_else_and_only_once(tmp_path, need_package, fake_hub):
    endpoint = f"http://127.0.0.1:{fake_hub.server_port}"
    found, error = ask("org/tiny", tmp_path, HF_ENDPOINT=endpoint, HF_HUB_DISABLE_XET="1")
    assert found, error
    wanted = {name for name in FILES if "/" not in name and not name.startswith(("pytorch", "model.gguf", "cons"))}
    assert {path.name for path in pathlib.Path(found).iterdir()} == wanted
    assert (pathlib.Path(found) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    fake_hub.asked.clear()
    assert ask("org/tiny", tmp_path, HF_ENDPOINT=endpoint) == (found, "")
    assert fake_hub.asked == []


def test_a_run_downloads_its_model_once_and_its_parts_find_it_in_the_cache(tmp_path, need_package, fake_hub):
    settings = {
        "model.path": "org/tiny",
        "model.shape": "configs/arithmetic_model/config.json",
        "run.dir": tmp_path / "run",
        "trainer.steps": 1,
        "trainer.prompts_per_step": 2,  # as few programs, and as small ones, as do
        "trainer.objective.minibatches": 1,
        "rollout.max_new_tokens": 8,
        "generation.slots": 8,
        "generation.length_buckets": "(112,)",
        "eval.prompts": 2,
        "metrics.tensorboard": False,
    }
    command = [sys.executable, "-m", "areal_jax.main", "--config=configs/math.py"]
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": f"http://127.0.0.1:{fake_hub.server_port}",
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["path"] == "org/tiny"
    gets = collections.Counter(path for verb, path in fake_hub.asked if verb == "GET" and "org/tiny" in path)
    assert set(gets.values()) == {1}
    assert f"/org/tiny/resolve/{COMMIT}/model.safetensors" in gets


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (
            "org/gated",
            "PermissionError: model.path=org/gated: .*accepted its terms; accept them on .*org/gated.*HF_TOKEN",
        ),
        (
            "org/unknown",
            "FileNotFoundError: model.path=org/unknown: .*has no repository org/unknown .*mind the spelling",
        ),
        ("org/tiny@v9", "FileNotFoundError: model.path=org/tiny@v9: .*org/tiny has no revision v9; a branch"),
    ],
)
def test_what_the_hub_refuses_is_said_in_a_sentence_of_its_own(tmp_path, need_package, fake_hub, path, error):
    found, said = ask(path, tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{fake_hub.server_port}")
    assert not found
    assert re.match(error, said), said
