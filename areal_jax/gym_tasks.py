"""Which tasks of the package reasoning-gym are asked here, why not the others, and the three calls made of it.

In: a task's name, its parameters, a number, or a text to judge. Out: an entry of reasoning_gym, or a score. Called by
the prompt source `rollout.reasoning_gym` and, in the workers of the reward pool, by `rewards.reasoning_gym`. Waits for
nobody. Both lists were made from reasoning-gym 0.1.25 by reading every scorer and by the tests in
tests/rewards/test_reasoning_gym.py; a task that is in neither (a newer release) is refused.
"""

import dataclasses
import difflib
import functools
import importlib
import json
from collections.abc import Mapping
from typing import Any

ALLOWED = frozenset([
    "ab", "advanced_geometry", "aiw", "arc_1d", "base_conversion", "basic_arithmetic", "binary_alternation",
    "bitwise_arithmetic", "caesar_cipher", "calendar_arithmetic", "chain_sum", "circuit_logic",
    "color_cube_rotation", "count_bits", "count_primes", "course_schedule", "cryptarithm", "decimal_arithmetic",
    "decimal_chain_sum", "dice", "emoji_mystery", "family_relationships", "fraction_simplification", "game_of_life",
    "gcd", "group_anagrams", "jugs", "kakurasu", "knights_knaves", "largest_island", "lcm",
    "leg_counting", "letter_counting", "letter_jumble", "mahjong_puzzle", "manipulate_matrix", "maze",
    "mini_sudoku", "modulo_grid", "needle_haystack", "number_filtering", "number_format", "number_sequence",
    "palindrome_generation", "palindrome_partitioning", "path_star", "power_function", "prime_factorization",
    "products", "rectangle_count", "rotate_matrix", "rotten_oranges", "self_reference", "sentence_reordering",
    "shortest_path", "simple_equations", "simple_geometry", "string_splitting",
    "string_synthesis", "survo", "syllogism", "time_intervals", "tower_of_hanoi", "tsumego",
    "word_sequence_reversal", "word_sorting",
])  # fmt: skip

EXECUTES_PYTHON = "its scorer calls eval on the answer, which runs any code in it"
EXECUTES_SYMPY = "its scorer gives the answer to sympy's parse_expr, which runs any code in it, and hangs on 9**9**9**9"
NOT_REPRODUCIBLE = "its problems differ between processes (they depend on its hash seed or global generator)"
NO_ORACLE = "its entries have no answer, so that nothing shows that its scorer finds a right one right"
TOO_SLOW = "a problem takes more than 0.1 s to make, for which every other request of the controller waits"
TUPLES = "its scorer compares with tuples, which an answer that travels as JSON does not have"

EXCLUDED = {
    "acre": "it makes all problems of a data set at once, so that there is no endless stream of it",
    "arc_agi": TUPLES,
    "bf": "it prints a dot for each problem that it makes, into the log of whoever asks",
    "binary_matrix": EXECUTES_PYTHON,
    "boxnet": NO_ORACLE,
    "codeio": "it runs the programs of its data set in the process that asks, and takes more than 0.1 s",
    "coin_flip": "its scorer hangs on 1e999999999, and gives full marks for the first characters of the answer, as 0",
    "complex_arithmetic": "its scorer gives full marks for nan",
    "composite": "it is a mixture of other tasks; give those as tasks, each with its weight",
    "countdown": EXECUTES_SYMPY,
    "figlet_font": "its scorer gives full marks for ten right letters of a longer word",
    "futoshiki": TOO_SLOW,
    "game_of_life_halting": "its scorer gives full marks for any text that is not empty when the answer is True",
    "graph_color": NO_ORACLE,
    "intermediate_integration": EXECUTES_SYMPY,
    "gsm_symbolic": "its scorer takes the first digits of the text, so that -288 and `288 or 7` get full marks for 288",
    "isomorphic_strings": NOT_REPRODUCIBLE,
    "knight_swap": TOO_SLOW,
    "list_functions": NOT_REPRODUCIBLE,
    "n_queens": EXECUTES_PYTHON,
    "number_sorting": "its scorer gives full marks for a list of NaN, and for numbers that are off by one",
    "polynomial_equations": "its scorer gives full marks for any text without a number when there is no solution",
    "polynomial_multiplication": EXECUTES_SYMPY,
    "pool_matrix": "it reseeds numpy's global generator for each problem, under everybody else in the process",
    "propositional_logic": NO_ORACLE + "; a repeated premise gets full marks",
    "puzzle24": EXECUTES_SYMPY,
    "quantum_lock": TOO_SLOW,
    "ransom_note": NOT_REPRODUCIBLE,
    "rearc": TUPLES,
    "rubiks_cube": NO_ORACLE,
    "rush_hour": NO_ORACLE,
    "simple_integration": EXECUTES_SYMPY,
    "sokoban": TOO_SLOW,
    "spell_backward": "its scorer gives full marks for the first characters of the answer with others behind them",
    "spiral_matrix": EXECUTES_PYTHON,
    "string_insertion": EXECUTES_PYTHON,
    "string_manipulation": "the answer to some of its problems is the empty text, for which its scorer gives nothing",
    "sudoku": TOO_SLOW + "; mini_sudoku is allowed",
    "word_ladder": NOT_REPRODUCIBLE,
    "zebra_puzzles": TOO_SLOW,
}

# What these scorers raise for a text that is no answer of the right form; anything else that is raised is an error.
MALFORMED: dict[str, tuple[type[Exception], ...]] = {
    "game_of_life": (KeyError,),  # an object in place of the list
    "prime_factorization": (ValueError,),  # a factor that is no integer
    "time_intervals": (OverflowError,),  # seconds with more than 308 decimals
}
OWN = ("seed", "size")  # parameters that the stream decides


def library() -> Any:
    """The package. Raises ModuleNotFoundError that says how to install it; importing it takes seconds."""
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ModuleNotFoundError(
            "the package reasoning-gym, whose tasks the config asks for, is not installed: pip install reasoning-gym",
            name=error.name,
        ) from error


def check_allowed(task: str, place: str) -> None:
    """Raises ValueError for a task that is not on the list: why, and where the list is or which name is the nearest."""
    if task in ALLOWED:
        return
    if task in EXCLUDED:
        told = f"{EXCLUDED[task]}; choose one of the {len(ALLOWED)} in ALLOWED of areal_jax/gym_tasks.py"
    else:
        near = difflib.get_close_matches(task, sorted(ALLOWED), n=1, cutoff=0.0)[0]
        told = f"it is no task that has been examined here (areal_jax/gym_tasks.py); the nearest that was is {near}"
    raise ValueError(f"{place}: the reasoning-gym task {task!r} is not allowed: {told}")


def check_parameters(task: str, parameters: Mapping[str, Any], place: str) -> None:
    """Raises ValueError for a parameter that the task does not have, or values that it refuses."""
    config = library().factory.DATASETS[task][1]
    own = [field.name for field in dataclasses.fields(config) if field.name not in OWN]
    unknown = [key for key in parameters if key not in own]
    if unknown:
        raise ValueError(f"{place}: {task} has no parameter {unknown[0]!r}; its own are {', '.join(own)}")
    try:
        library().create_dataset(task, **parameters)
    except (AssertionError, ValueError, TypeError) as error:  # which of them is up to the task
        raise ValueError(f"{place}: {task} refuses {dict(parameters)}: {error}") from error


def entry(task: str, parameters: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Problem `number` of a task, with its question, answer and metadata: a function of the three alone."""
    return _dataset(task, json.dumps(parameters, sort_keys=True))[number]


def score(task: str, parameters: Mapping[str, Any], text: str, reference: Mapping[str, Any]) -> float:
    """What the task's scorer gives for a text: 1.0 full marks, less for anything else.

    `reference` has the entry's answer and metadata. Several scorers read the parameters, for instance for a tolerance.
    """
    try:
        return float(_dataset(task, json.dumps(parameters, sort_keys=True)).score_answer(text, dict(reference)))
    except MALFORMED.get(task, ()):
        return 0.0


@functools.lru_cache(maxsize=256)
def _dataset(task: str, parameters: str) -> Any:
    """Kept, for some read a word list when they are made. Item i is drawn from the seed 0 + i, whatever the size."""
    return library().create_dataset(task, **json.loads(parameters), seed=0)
