"""The gate's inequality and the staleness figures, by hand."""

import numpy as np
import pytest

from areal_jax.algorithms.staleness import gate_is_open, staleness_figures, token_staleness


@pytest.mark.parametrize(
    ("request_number", "version", "eta", "is_open"),
    [
        (1, 0, 0, True),  # floor(0 / 4) = 0 <= 0
        (4, 0, 0, True),  # floor(3 / 4) = 0
        (5, 0, 0, False),  # floor(4 / 4) = 1
        (5, 1, 0, True),
        (12, 0, 2, True),  # floor(11 / 4) = 2
        (13, 0, 2, False),
        (13, 1, 2, True),
    ],
)
def test_gate_follows_the_papers_inequality(request_number, version, eta, is_open):
    assert gate_is_open(request_number, batch_size=4, version=version, max_staleness=eta) == is_open


def test_staleness_is_consuming_version_minus_token_version():
    np.testing.assert_array_equal(token_staleness(np.array([3, 3, 5]), version=5), [2, 2, 0])


def test_figures_count_tokens_not_trajectories():
    figures = staleness_figures([np.array([5, 5, 5]), np.array([3, 4])], version=5)
    # 0 0 0 2 1: mean 3 / 5, three of staleness 0, one each of 1 and 2
    assert figures == {"mean": 0.6, "min": 0, "max": 2, "histogram": [3, 1, 1]}


def test_a_token_from_the_future_is_refused():
    with pytest.raises(ValueError, match="a token of version 7 reached the trainer at version 5"):
        staleness_figures([np.array([5, 7])], version=5)
