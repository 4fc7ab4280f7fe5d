"""The compatibility module for google-jetstream. Imports are watched in processes of their own."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from third_party.jetstream import compat


def run(code: str) -> str:
    """What a fresh interpreter prints for `code`."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_orchestrator_leaves_the_root_logger_alone_and_mends_delete_pytree():
    code = """
import logging, sys
from third_party.jetstream import compat
assert compat.ORCHESTRATOR not in sys.modules, "imported eagerly"
logging.getLogger().setLevel(logging.ERROR)
from jetstream.core import orchestrator
print(logging.getLogger().level == logging.ERROR, logging.getLogger().handlers, orchestrator.delete_pytree.__module__)
print("tensorflow" in sys.modules, "seqio" in sys.modules)
"""
    assert run(code).splitlines() == ["True [] third_party.jetstream.compat", "False True"]


def test_an_orchestrator_that_was_imported_first_is_mended_too():
    code = """
import logging
from jetstream.core import orchestrator
assert logging.getLogger().level == logging.DEBUG, "JetStream no longer does this; drop compat"
from third_party.jetstream import compat
print(logging.getLogger().level == logging.WARNING, logging.getLogger().handlers, orchestrator.delete_pytree.__module__)
"""
    assert run(code).split() == ["True", "[]", "third_party.jetstream.compat"]


def test_importing_the_engine_api_needs_neither_tensorflow_nor_the_orchestrator():
    code = """
import sys
from third_party.jetstream import compat
from jetstream.engine import engine_api
print(sorted({"tensorflow", "jetstream.core.orchestrator"} & set(sys.modules)))
"""
    assert run(code).strip() == "[]"


def test_delete_pytree_frees_the_arrays_and_leaves_what_is_no_array():
    tree = {"cache": [jnp.ones(3), jnp.zeros(2)], "length": 3, "name": "prefix"}
    compat.delete_pytree(tree)
    assert tree["cache"][0].is_deleted() and tree["cache"][1].is_deleted()
    assert tree["length"] == 3


def test_the_reason_still_holds():
    """When jax brings `tree_map` back, the patch has lost its reason."""
    with pytest.raises(AttributeError):
        _ = jax.tree_map
