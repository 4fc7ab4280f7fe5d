import pytest

from areal_jax.rollout.sums import Sum, Sums

TEMPLATE = "Q: {prompt} A:"


class Bytes:
    def encode(self, text):
        return list(text.encode())


def sums(split="train", seed=1, **options):
    return Sums(split=split, seed=seed, tokenizer=Bytes(), **options)


def test_answers_are_those_of_the_question():
    assert (Sum(8, "+", 5).text, Sum(8, "+", 5).answer) == ("What is 8 + 5?", "13")
    assert Sum(8, "-", 15).answer == "-7"


def test_every_problem_is_either_trained_on_or_held_out():
    train, held_out = sums(), sums("held_out")
    asked = [{source[uid].text for uid in range(len(source))} for source in (train, held_out)]
    assert len(train) + len(held_out) == 81 == len(asked[0] | asked[1])
    assert not asked[0] & asked[1] and len(held_out) > 15


def test_a_uid_is_one_prompt_and_each_epoch_asks_everything_once_in_another_order():
    source, n = sums(largest=9), len(sums(largest=9))
    first, second = ([source[uid].text for uid in range(start, start + n)] for start in (0, n))
    assert first != second and sorted(first) == sorted(second)
    assert [sums()[uid].text for uid in range(n)] == first != [sums(seed=2)[uid].text for uid in range(n)]


def test_the_held_out_problems_do_not_depend_on_the_seed():
    assert [sums("held_out", 1)[uid].text for uid in range(9)] == [sums("held_out", 7)[uid].text for uid in range(9)]


def test_the_question_stands_in_the_template():
    prompt = sums(template=TEMPLATE)[3]
    assert prompt.text.startswith("Q: What is ") and prompt.text.endswith("? A:")
    assert bytes(prompt.tokens.tolist()).decode() == prompt.text and prompt.uid == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"largest": 1}, "largest=1"),
        ({"operators": "*"}, r"operators='\*'"),
        ({"operators": ""}, "operators=''"),
        ({"template": "ask"}, "template='ask'"),
    ],
)
def test_what_cannot_be_asked_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sums(**options)
