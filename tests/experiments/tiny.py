"""The model that all tests of benchmarks train, so that they share its compiled programs."""

from areal_jax.models.transformer import TransformerConfig

TINY = TransformerConfig(
    vocab_size=32, d_model=16, layers=1, heads=4, kv_heads=2, head_size=8, d_ff=24, tied_embeddings=True, family="llama"
)
ROW = 64  # tokens of the one row of a microbatch
