"""Compilations of this process: counted, and cached on disk between runs.

Every program is compiled during warm-up; one after it is a defect that costs seconds, so the count is a metric.
"""

import os
import pathlib

import jax

_compilations = 0


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    global _compilations
    _compilations += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_on_event)


def count() -> int:
    """Programs that XLA compiled, or loaded from the cache on disk, in this process so far."""
    return _compilations


def enable_cache() -> None:
    """Keeps compiled programs in JAX_COMPILATION_CACHE_DIR, or in .cache/jax of the user's home."""
    home = pathlib.Path.home() / ".cache" / "areal_jax" / "jax"
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(home)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
