"""A model directory served by itself: OpenAI's API and /metrics over HTTP, Generation and JetStream's Decode by gRPC.

    python -m areal_jax.main --config=configs/serve.py --role=generator --config.model.path=DIR

Any machine that holds the weights and the cache; with `--dry_run` the command says how much that is. Expect "model NAME
is served on http://127.0.0.1:8000/v1" once every length bucket is compiled. `generation.slots` sequences decode at a
time, each of at most `generation.max_length` tokens, prompt and answer.
"""

from areal_jax.config import default_config


def get_config():
    config = default_config()
    config.run.name = "serve"
    config.generation.addresses = ("127.0.0.1:8001",)
    config.generation.http_addresses = ("127.0.0.1:8000",)
    config.generation.slots = 16
    config.generation.max_length = 2048
    config.generation.top_logprobs = 20  # OpenAI's own limit
    return config
