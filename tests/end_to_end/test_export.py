"""A run's checkpoint as a model directory: `transformers` loads it, and says what our own engine says."""

import asyncio
import itertools
import subprocess
import sys

import numpy as np
import pytest

from areal_jax import config as config_lib
from areal_jax import export
from areal_jax.launch import generation_server, roles
from areal_jax.launch.threads import LocalGenerate
from areal_jax.models.huggingface import load_config
from areal_jax.models.safetensors_files import load_model
from areal_jax.tokenizer import Tokenizer
from areal_jax.trainer.checkpoint import SavedParams
from areal_jax.types import GenerateRequest, Sampling
from configs import math
from tests.end_to_end import job

PROMPTS = 12
STEPS = 4


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The directory that the command made of a run of four steps."""
    directory = tmp_path_factory.mktemp("export")
    settings = {"run.launch": "threads", "trainer.steps": STEPS, "eval.every": 0, "trainer.optimizer.lr": 1e-3}
    status, _, err = job.run(directory / "run", settings)
    assert (status, err) == (0, "")
    line = [sys.executable, "-m", "areal_jax.export", f"--checkpoint={directory / 'run'}", f"--out={directory / 'out'}"]
    subprocess.run(line, check=True, cwd=job.ROOT, env=job.ENVIRONMENT, timeout=120)
    return directory / "out"


def settings_of(model):
    settings = math.get_config()
    settings.model.path = str(model)
    settings.generation.length_buckets = (112,)
    return config_lib.build(settings)


def our_answers(model):
    """Greedy answers of our own engine: (prompt tokens, completion tokens)."""
    settings, tokenizer = settings_of(model), Tokenizer.load(model)
    prompts = list(itertools.islice(roles.load_prompts(settings, "held_out", tokenizer), PROMPTS))
    sampling = Sampling(settings.rollout.max_new_tokens, temperature=0.0, stop_tokens=tokenizer.eos_ids)
    scheduler = generation_server.make_scheduler(settings)

    async def ask():
        generate = LocalGenerate(scheduler)
        return await asyncio.gather(*(generate(GenerateRequest(p.uid, p.tokens, (0,), sampling)) for p in prompts))

    completions = asyncio.run(ask())
    scheduler.stop()
    return [
        (prompt.tokens.tolist(), completion.tokens.tolist())
        for prompt, (completion,) in zip(prompts, completions, strict=True)
    ]


def test_transformers_generates_from_it_what_our_engine_does(exported):
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0")
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    answers = our_answers(exported)
    lengths = set()
    for prompt, ours in answers:
        text = tokenizer.decode(prompt)
        assert tokenizer(text)["input_ids"] == prompt
        theirs = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=56)[0, len(prompt) :].tolist()
        assert theirs == ours
        assert ours[-1] == tokenizer.eos_token_id
        lengths.add(len(ours))
    assert len(lengths) > 1, "they are answers, not one token"


def test_a_run_begins_with_it(exported, tmp_path):
    """In again: version 0 of the next run is the exported weights, which its checkpoint shows at learning rate 0."""
    settings = {
        "model.path": exported,
        "run.launch": "threads",
        "trainer.steps": 1,
        "eval.every": 0,
        "trainer.optimizer.lr": 0.0,
    }
    status, _, err = job.run(tmp_path / "run", settings)
    assert (status, err) == (0, "")
    line = [sys.executable, "-m", "areal_jax.export", f"--checkpoint={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"]
    subprocess.run(line, check=True, cwd=job.ROOT, env=job.ENVIRONMENT, timeout=120)
    first, second = ((path / "model.safetensors").read_bytes() for path in (exported, tmp_path / "out"))
    assert first == second
    shipped = (job.ROOT / "configs" / "arithmetic_model" / "model.safetensors").read_bytes()
    assert not np.array_equal(first, shipped), "it had learned"


def test_a_vocabulary_padded_for_the_mesh_trains_and_is_exported_as_it_was(tmp_path, monkeypatch):
    """97 words on a tensor axis of 2: trainer and generator hold 98 rows, and the last one is never sampled."""
    monkeypatch.setitem(job.ENVIRONMENT, "XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    settings = {
        "run.launch": "threads",
        "trainer.mesh.data": 1,
        "trainer.mesh.tensor": 2,
        "trainer.steps": 2,
        "eval.every": 0,
        "trainer.optimizer.lr": 0.0,
    }
    status, _, err = job.run(tmp_path / "run", settings)
    assert (status, err) == (0, "")
    assert SavedParams(export.find_version(tmp_path / "run"))["embedding"].shape == (98, 64)
    assert job.read_summary(tmp_path / "run")["logp_gap"]["max"] < 1e-3
    waiting = [
        t
        for version in job.checkpoints(tmp_path / "run")
        for t in job.waiting(job.saved_queue(tmp_path / "run", version))
    ]
    assert all(t.tokens.max() < 97 for t in waiting)
    export.export(tmp_path / "run", tmp_path / "out")
    config, params = load_model(tmp_path / "out")
    assert config == load_config(job.ROOT / "configs" / "arithmetic_model")
    for name, value in load_model(job.ROOT / "configs" / "arithmetic_model")[1].items():
        np.testing.assert_array_equal(params[name], value.astype(np.float32))
