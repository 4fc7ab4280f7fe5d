"""Where a model lies on this machine: a directory as it is, or a hub id by the cache of the package huggingface_hub.

In: `model.path`. Out: a directory in the Hugging Face format. Called by whoever reads a model directory, before it
does; `main` calls it first and alone, so that the parts of a run find the cache filled. Waits for the download where
there is one. A model that cannot be had is an error: no other one takes its place.
"""

import importlib.util
import json
import logging
import os
import pathlib
from typing import Any

from areal_jax.config import is_hub_id, no_model_directory

log = logging.getLogger(__name__)

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.json"]
IGNORED = ["*.bin", "*.gguf", "consolidated*", "*/*"]  # second copies: Mistral's, Llama's original/, others' onnx/
INDEX = "model.safetensors.index.json"


def model_directory(path: str) -> pathlib.Path:
    """The directory of a model; a hub id "org/name" or "org/name@revision" is downloaded unless the cache has it.

    What the cache has is used without asking the hub for anything newer: name a revision to be sure of one. Raises
    FileNotFoundError or ValueError that say what was looked for, where, and what to do.
    """
    found = find_model(path)
    if found is not None:
        return found
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ValueError(
            f"model.path={path} is no directory here, and to take it from the hub needs the package huggingface_hub, "
            "which is not installed; run `pip install huggingface_hub`, or give a directory"
        )
    return _download(*_split(path))


def find_model(path: str) -> pathlib.Path | None:
    """The directory of a model that is on this machine, whole; None for a hub id that is not. Never uses the network.

    Raises FileNotFoundError for a path of a directory that does not exist.
    """
    directory = pathlib.Path(path).expanduser()
    if directory.is_dir():
        return directory
    if not is_hub_id(path):
        raise FileNotFoundError(no_model_directory(path))
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    snapshot = _cached(*_split(path))
    return None if snapshot is None or missing_files(snapshot) else snapshot


def missing_files(directory: pathlib.Path) -> list[str]:
    """What a model directory lacks of `config.json` and the weights, all shards that its index names."""
    wanted = ["config.json"]
    index = directory / INDEX
    if (directory / "model.safetensors").exists():
        pass  # all weights are in this one file, whatever lies beside it
    elif index.exists():
        wanted += sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif not list(directory.glob("*.safetensors")):
        wanted.append("*.safetensors")
    return [name for name in wanted if not (directory / name).exists()]


def _split(path: str) -> tuple[str, str | None]:
    """("org/name", revision) of a hub id; without "@" the revision is None, the hub's own default."""
    repo, _, revision = path.partition("@")
    return repo, revision or None


def _cached(repo: str, revision: str | None) -> pathlib.Path | None:
    """The snapshot in the cache, which may lack files; None when there is none."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return pathlib.Path(huggingface_hub.snapshot_download(repo, local_files_only=True, **_choice(revision)))
    except LocalEntryNotFoundError:
        return None


def _choice(revision: str | None) -> dict[str, Any]:
    return {"revision": revision, "allow_patterns": PATTERNS, "ignore_patterns": IGNORED}


def _download(repo: str, revision: str | None) -> pathlib.Path:
    import huggingface_hub

    log.info("model %s: from %s into the cache %s", _join(repo, revision), _endpoint(), _cache())
    try:
        snapshot = pathlib.Path(huggingface_hub.snapshot_download(repo, **_choice(revision)))
    except Exception as error:  # the package's HTTP library, and so the type, changes with its version
        if isinstance(error, OSError) and error.errno:
            raise  # a full disk, a cache that may not be written
        raise _explained(repo, revision, error) from error
    missing = missing_files(snapshot)
    if missing:
        raise FileNotFoundError(
            f"model.path={_join(repo, revision)}: {snapshot} lacks {', '.join(missing)}; complete the download with "
            f"`hf download {repo}` where there is a network, or choose a repository that has weights as *.safetensors"
        )
    return snapshot


def _explained(repo: str, revision: str | None, error: Exception) -> OSError | ValueError:
    """The error of the hub's package in words that say what to do."""
    from huggingface_hub import errors

    start = f"model.path={_join(repo, revision)}: no such directory here, and "
    page = f"{_endpoint()}/{repo}"
    refused = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
    if isinstance(error, errors.GatedRepoError) or (refused and not isinstance(error, errors.RepositoryNotFoundError)):
        return PermissionError(
            f"{start}the hub gives it only to those who accepted its terms; accept them on {page}, then set "
            "HF_TOKEN to an access token of that account"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return FileNotFoundError(
            f"{start}the hub has no repository {repo} ({page}), or shows it only to a member; mind the spelling, and "
            "for a private one set HF_TOKEN to an access token"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return FileNotFoundError(f"{start}{page} has no revision {revision}; a branch, a tag or a commit is needed")
    said = str(error).splitlines()[0] if str(error) else ""
    return FileNotFoundError(
        f"{start}the hub did not give it ({type(error).__name__}: {said}). Looked for the revision "
        f"{revision or 'main'} in the cache {_cache()} (HF_HUB_CACHE) and at {_endpoint()} (HF_ENDPOINT)"
        f"{_offline()}. Without a network: run `hf download {repo}{f' --revision {revision}' if revision else ''} "
        "--local-dir DIR` on a machine that has one, copy DIR here, and set --config.model.path=DIR. A gated model "
        "also needs HF_TOKEN"
    )


def _join(repo: str, revision: str | None) -> str:
    return f"{repo}@{revision}" if revision else repo


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _offline() -> str:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return "; HF_HUB_OFFLINE forbids the network: unset it where there is one" if offline else ""
