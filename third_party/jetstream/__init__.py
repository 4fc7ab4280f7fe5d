"""Adapts google-jetstream 0.2.2 (Apache-2.0, https://github.com/AI-Hypercomputer/JetStream); see `compat`."""
