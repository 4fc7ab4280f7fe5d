"""areal_jax: fully asynchronous reinforcement learning for language models that reason, on JAX."""
