"""Makes google-jetstream 0.2.2 run on today's jax, and keeps it out of the root logger.

Origin: google-jetstream 0.2.2 (Apache-2.0, https://github.com/AI-Hypercomputer/JetStream), the last release on the
package index; the project is archived since 2026-02, so neither defect will be mended there. Nothing is copied from it.

Both defects sit in `jetstream.core.orchestrator`:
- `delete_pytree` calls `jax.tree_map`, which jax no longer has. The generate thread raises at the first insert, and
  JetStream answers an exception in any of its threads by killing the process (SIGKILL).
- importing it sets the root logger to DEBUG and gives it a handler on stdout: several lines per decode step, from every
  library of the process.

In: nothing. Out: importing this module arranges that the orchestrator is mended the moment it is imported, by whomever
(it is not imported here: it pulls in gRPC and Prometheus, which only its stock driver needs). Called by: `generation/`
alone, which imports this module before anything of JetStream.
"""

import importlib.machinery
import logging
import sys
import types
from collections.abc import Sequence
from typing import Any

import jax

ORCHESTRATOR = "jetstream.core.orchestrator"


def delete_pytree(tree: Any) -> None:
    """Frees the device memory of every `jax.Array` in the tree; what JetStream's function of this name intends."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the orchestrator, then mends it."""

    def exec_module(self, module: types.ModuleType) -> None:
        level = logging.getLogger().level
        super().exec_module(module)
        _mend(module, level)


class _Finder:
    """Stands first on `sys.meta_path` and answers for the orchestrator only."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> Any:
        if name != ORCHESTRATOR:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


def _mend(orchestrator: Any, level: int) -> None:
    """Replaces the broken function; takes the handler off the root logger and gives that its level back."""
    orchestrator.delete_pytree = delete_pytree
    logging.getLogger().removeHandler(orchestrator.handler)
    logging.getLogger().setLevel(level)


if ORCHESTRATOR in sys.modules:  # too late for its level; WARNING is what Python starts with
    _mend(sys.modules[ORCHESTRATOR], logging.WARNING)
else:
    sys.meta_path.insert(0, _Finder)
