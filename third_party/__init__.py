"""What adapts or stands in for other people's packages, each with its reason, origin version and licence.

A package so that `from third_party.jetstream import compat` finds this directory and no other of the same name.
It works wherever `areal_jax` itself is importable from a checkout, since both lie in the repository's root:
`python -m areal_jax.main`, `python -m experiments.NAME` and pytest from the root.
"""
