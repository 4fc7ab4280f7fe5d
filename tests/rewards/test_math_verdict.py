"""The symbolic verifier against verdicts that were decided by hand, and against texts that are written to break it."""

import pathlib
import random
import subprocess
import sys
import time

import pytest

from areal_jax.rewards import symbolic
from areal_jax.rewards.math_verdict import answers_match
from areal_jax.rewards.pool import RewardPool

CASES = [  # "Math verdicts" of the collection of small inputs on which systems of this kind have gone wrong
    ("3x + 4y + 14 = 0", "3*x-1*y+13=0", 0),
    (r"$1-\frac{1}{e}$", r"$1+\frac{1}{e}$", 0),
    ("$n=2,3,4$", "$n=1,2,3$", 0),
    (r"$\pm 2021$", "$2021$", 0),
    ("$12:00$", "$1:00$", 0),
    ("73", "... Final Answer: **73**", 1),
    ("$13$", r"$\text{13}$", 1),
    ("42", r"<answer>\boxed{42}</answer>", 1),
    ("9007199254740993", "9007199254740992", 0),
    ("0", "", 0),
    ("5", r"\boxed{4} or maybe \boxed{5}", 1),  # the last box answers
    ("4", r"\boxed{4} or maybe \boxed{5}", 0),
    ("9", "$10^{1000000}$", 0),
    ("3", "The answer is 3 factorial.", 0),
    ("3", "The answer is 3 squared.", 0),
    ("3000", "The answer is 3 thousand.", 1),
    ("3", "<answer>it is not 3</answer>", 0),
    ("-2", "it is minus 2", 1),
    (r"\text{yes}", "So the answer is Yes.", 1),
]
SENSELESS = [  # on which sympy raises, each in another place; gold, said
    ("3", r"3 \mod 5"),
    ("3", "(-1)!"),
    ("3", r"x \mod 0"),
    ("y=2x+1", r"\sin 1/0"),
    ("3", r"(3)!+\lfloor .5\rfloor \pm \lfloor \infty\rfloor"),
    ("3", r"i \mod ((.5)!)!"),
    ("x^2+1", r"\log 0 \mod \lfloor 0\rfloor"),
]
LEAVES = ["x", "y", "0", "1", "2", "3", "-1", ".5", "i", "I", "e", r"\pi", r"\infty", "", "}", r"\foo"]
FORMS = [r"\frac{%s}{%s}", r"\sqrt{%s}", "(%s)^{%s}", "%s%s", "%s+%s", r"%s \mod %s", "(%s)!", "-%s", "%s'"]
FORMS += [r"\log %s", r"\sin %s/%s", "%s<%s", "%s=%s", "(%s,%s)", "%s,%s", r"\binom{%s}{%s}", "|%s|", "[%s,%s)"]
FORMS += [r"\lfloor %s\rfloor", r"\{%s,%s\}", r"%s\cup %s", r"%s\text{ or }%s", r"%s \pm %s", "%s:%s"]
FORMS += [r"\begin{pmatrix}%s&%s\end{pmatrix}"]
GOLDS = ["3", "y=2x+1", "x^2+1", "(1,2)", "x<2", "1,2", r"\frac{1}{x}", "2x+y<3", r"\begin{pmatrix}1&2\end{pmatrix}"]
BOXED = [
    # numbers
    (r"\frac{1}{2}", "2^{-1}", 1),
    (r"\frac{1}{2}", "50/100", 1),
    ("1/3", "0.333", 0),
    ("1/3", "0." + "3" * 50, 0),
    (r"\frac16", r"0.1\overline{6}", 1),
    (".0000672", "672", 0),
    (r"\frac{x}{2}", "0.5x", 1),
    (r"1\frac{4}{5}", r"\frac{9}{5}", 1),
    (r"1\frac{4}{5}", "1.8", 1),
    (r"1\frac{4}{5}", r"\frac45", 0),
    (r"137 \frac{1}{2}", "137 1/2", 1),
    (r"50\%", "50", 1),
    ("0.5", r"50\%", 0),
    (r"90^\circ", "90", 1),
    (r"\$32,\!348", "32348", 1),
    ("58,500", "58500", 1),
    ("2", "2 pi", 0),
    ("5", "5 million", 0),
    ("1234", r"1\,234", 1),
    ("234", r"2\,34", 0),
    ("-2", "–2", 1),  # an en-dash
    ("120", "5!", 1),
    ("162", r"2\cdot 3^4", 1),
    ("10^{-20}", "10^{-21}", 0),
    (r"\sqrt{2}", r"\sqrt{2}+10^{-30}", 0),
    ("e^{-50}", "e^{-60}", 0),
    (r"\pi\cdot 10^{-70}", r"\pi\cdot 10^{-71}", 0),
    # units
    ("7", r"7 \text{ million}", 0),
    ("7000000", r"7 \text{ million}", 1),
    ("7000000", r"\$7\text{ million dollars}", 1),
    ("2500000000", r"2.5\text{ billion}", 1),
    ("7", r"7 \text{ thousand}", 0),
    ("700", r"7 \text{ hundred}", 1),
    ("36", "3 dozen eggs", 1),
    ("3", r"3\text{ dozens}", 0),
    ("3", r"3\text{ and a half}", 0),
    ("3", r"3\text{ halves}", 0),
    ("3", r"3\text{ or more}", 0),
    ("3", r"3\text{ factorial}", 0),
    ("3", r"3\text{ squared}", 0),
    ("3", r"3 \text{ is not right}", 0),
    ("3", r"3\text{ or }", 0),
    ("3", r"3\text{ thirds}", 0),
    ("3", r"3 \text{ fewer}", 0),
    ("3", r"3 \text{ hours and twenty minutes}", 0),
    ("3", r"3 \text{ percent}", 1),
    ("3", r"3 \text{ square feet}", 1),
    ("x", r"x\text{ or more}", 0),
    ("2x", r"2x\text{ dollars}", 1),
    (r"15\mbox{ cm}^2", "15", 1),
    ("15", r"15\text{ square centimetres}", 1),
    (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}", 1),
    # expressions
    ("(a+5)(b+2)", "ab+2a+5b+10", 1),
    ("(a+5)(b+2)", "ab+2a+5b+11", 0),
    (r"1-\frac{1}{e}", r"\frac{e-1}{e}", 1),
    (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}", 1),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt3}", 1),
    (r"\frac{\sqrt{3}}{3}", "0.577350269189625764", 0),
    (r"\cot x", r"\frac{\cos x}{\sin x}", 1),
    ("x", r"\sqrt{x^2}", 0),
    ("3+4i", "(2+i)^2", 1),
    ("3R^2", "3r^2", 0),
    ("xy", "yx", 1),
    ("f'", "f", 0),
    ("x", "x''", 0),
    ("2x'", "2x", 0),
    ("f'", r"f^{\prime}", 1),
    ("f'(x)=2x", "2x", 1),
    ("f'(x)=2x", "f(x)=2x", 0),
    (r"\frac10", r"\frac20", 0),
    (r"\frac{1}{1-1}", r"\frac{2}{1-1}", 0),
    ("I", "i", 0),
    ("I", r"\sqrt{-1}", 0),
    ("2I+1", "1+2I", 1),
    ("x+I_0", "I_{0}+x", 1),
    ("x+I_0", "I_1+x", 0),
    ("x+I_0", "x+I", 0),
    ("2x", "2y", 0),
    # both signs, lists, sets
    (r"\pm 2021", "-2021, 2021", 1),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19} \text{ and } 1+\sqrt{19}", 1),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}", 0),
    (r"\{1\pm\sqrt{5},-2\}", r"-2,1+\sqrt5,1-\sqrt5", 1),
    ("n=2,3,4", "4,2,3", 1),
    ("1,-2", r"x=1\text{ or }x=-2", 1),
    ("1,-2", "(1,-2)", 0),
    ("1,-2", "1,-2,3", 0),
    ("1,2", "1,1", 0),
    ("1,1", "1,2", 0),
    ("5", "5,6", 0),
    ("x=1,y=2", "y=2,x=1", 1),
    ("x=1,y=2", "x=2,y=1", 0),
    ("x=1,y=2", "2,1", 0),
    # points, intervals
    ("(2,3)", r"(2, \frac{6}{2})", 1),
    ("(2,3)", "2,3", 0),
    ("(2,3)", "[2,3]", 0),
    ("(2,3)", "(3,2)", 0),
    ("(1,234)", "1234", 0),
    ("(3,4]", r"3 < x \le 4", 1),
    ("(3,4]", r"4 \ge x > 3", 1),
    ("(3,4]", "3 < x < 4", 0),
    (r"x \in [-2,7]", r"-2\leq x\leq 7", 1),
    (r"(5,\infty)", "x>5", 1),
    (r"(5,\infty)", "x<5", 0),
    (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)", 1),
    (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2]", 0),
    ("x<2", "y<2", 0),
    ("x<2", "2>x", 1),
    ("x<2", r"x \in (-\infty,2)", 1),
    (r"x \in [1,2]", r"y \in [1,2]", 0),
    (r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ or } x>2", 1),
    (r"(-\infty,1)\cup(2,\infty)", r"x \in (2,\infty)\cup(-\infty,1)", 1),
    (r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ and } x>2", 0),
    (r"(-\infty,1)\cup(2,\infty)", "x<1, x>2", 0),
    (r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ or } y>2", 0),
    (r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ or } x\ge 2", 0),
    (r"x<1 \text{ or } x>2", r"y<1 \text{ or } y>2", 0),
    (r"\emptyset", r"\varnothing", 1),
    ("(1,2)", "(x,y)=(1,2)", 1),
    ("(1,2)", "(x,y)=(2,1)", 0),
    ("(x,y)=(1,2)", "(y,x)=(1,2)", 0),
    # equations, inequalities
    ("3x + 4y + 14 = 0", "6x+8y=-28", 1),
    ("3x+4y+14=0", "3x+4y+15=0", 0),
    ("y=2x+3", "2x-y+3=0", 1),
    ("y=2x+3", "2x+3", 1),
    ("2x+3", "y=2x+3", 1),
    ("y=2x+3", "y=2x+4", 0),
    ("y=2x+3", "0=0", 0),
    ("x=5", "5", 1),
    ("f(x)=2x+1", "2x+1", 1),
    ("2x+y<3", "4x+2y<6", 1),
    ("2x+y<3", "-4x-2y<-6", 0),
    ("2x+y<3", r"2x+y\le 3", 0),
    # the rest
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{bmatrix} -\frac{1}{3} \\ \frac23 \end{bmatrix}", 1),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{pmatrix} -1/3 & 2/3 \end{pmatrix}", 0),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1,2)", 0),
    (r"\text{Evelyn}", "evelyn", 1),
    (r"\text{Evelyn}", "nylevE", 0),
    (r"\text{(C)}", "C", 1),
    (r"\text{(C)}", "D", 0),
    (r"\text{Yes}", "yes", 1),
    (r"\text{Yes}", r"\text{yes}", 1),
    ("Yes", "yes", 1),
    ("odd", "Odd", 1),
    (r"\text{No}", "no", 1),
    (r"\text{no}", "on", 0),
    (r"\text{no}", r"\text{on}", 0),
    (r"\text{Tom}", "tom", 1),
    ("Tom", r"\textbf{tom}", 1),
    (r"\text{AB}", r"\text{BA}", 0),
    (r"\text{AB}", "AB", 1),
    (r"\text{AB}", "BA", 0),
    ("ABC", r"\mathrm{CBA}", 0),
    (r"\text{A and B}", r"\text{B and A}", 1),
    (r"\text{I am}", "I am", 1),
    (r"\text{A},\text{B}", "B,A", 1),
    ("2516_8", "2516_{8}", 1),
    ("2516_8", "2516", 0),
    ("2516_8", "1358", 0),
    ("2516_8", "2516_9", 0),
    ("12:00", "12:00", 1),
    ("6:30", r"6{:}30", 1),
    ("1:2", "2:4", 0),
    ("1:2", "1/2", 0),
    (r"\emptyset", "0", 0),
]
HOSTILE = {
    "tower": "9^{9^{9^{9}}}",
    "plain tower": "9^9^9^9",
    "power with a million digits": "10^{1000000}",
    "power of a power": "(10^{9999})^{9999}",
    "factorial": "(10^8)!",
    "factorial of factorials": r"9999!\cdot(9999!)!",
    "binomial": r"\binom{1000000000}{500000000}",
    "sum": r"\sum_{i=1}^{1000000000} \frac{1}{i^2}",
    "product": r"\prod_{k=1}^{100000000} k",
    "integral": r"\int_0^1 x^{x^{x^x}} dx",
    "expansion": "(x+b+c+d+f)^{40}",
    "remainder": r"7^{10^{12}} \mod 13",
    "sine": r"\sin(10^{10^8})",
    "inequality": "x>2^{4^{8^{16}}}",
    "nested logarithms": r"\log(\log(\log(\log(\log(\log(5))))))",
    "digits": "1" * 100_000,
    "nines": "0." + "9" * 50_000,
    "set": r"\{" + ",".join(map(str, range(5000))) + r"\}",
    "fractions": r"\frac{1}{" * 200 + "1" + "}" * 200,
    "parentheses": "(" * 5000 + "1" + ")" * 5000,
    "roots": r"\sqrt{" * 300 + "2" + "}" * 300,
    "boxes": "\\boxed{" * 150_000,
    "prose": "so we see that it is 1 or maybe 2. " * 30_000,
    "dollars": "$" * 1_000_000,
    "matrix": r"\begin{pmatrix}" + r"1&2\\" * 500 + r"\end{pmatrix}",
    "equations": "x=1," * 3000,
    "exponent": "1e1000000000",
}
INJECTIONS = [
    "__import__('os').system('touch {file}')",
    r"\text{{__import__('os').system('touch {file}')}}",
    r"\operatorname{{__import__('os').system('touch {file}')}}",
    r"\mathrm{{open}}('{file}','w')",
    "x_{{__import__('os').system('touch {file}')}}",
    "1+open('{file}','w')",
    "2*__import__('pathlib').Path('{file}').touch()",
    r"\frac{{__import__('os').system('touch {file}')}}{{2}}",
    "[open('{file}','w') for x in (1,)]",
]
WATCH = """
import sys
from areal_jax.rewards import math_verdict, symbolic
math_verdict._prepare()
compiled = []
sys.addaudithook(lambda event, about: compiled.append(about[0]) if event == "compile" else None)  # eval does so first
for line in sys.stdin.read().split("\\0"):
    for gold in ("x^2+1", "(1,x)", "y=x", line):
        math_verdict.answers_match(completion=line, answer=gold)
        math_verdict.answers_match(completion="\\\\boxed{" + line + "}", answer=gold)
        math_verdict.answers_match(completion="\\\\boxed{" + line + "}", answer=gold + "+1")
# sympy's polynomials make themselves tuple arithmetic for a number of variables, out of nothing but that number
print([source for source in compiled if not bytes(source).startswith(b"def monomial_")])
"""


@pytest.mark.parametrize(("answer", "completion", "verdict"), CASES)
def test_a_known_trap_is_judged_right(answer, completion, verdict):
    assert answers_match(completion=completion, answer=answer) == verdict


@pytest.mark.parametrize(("answer", "said", "verdict"), BOXED)
def test_what_is_equal_to_what(answer, said, verdict):
    assert answers_match(completion=rf"so it is \boxed{{{said}}}.", answer=answer) == verdict


@pytest.mark.parametrize(("gold", "said"), SENSELESS)
def test_what_has_no_value_is_wrong_and_raises_nothing(gold, said):
    assert answers_match(completion=rf"\boxed{{{said}}}", answer=gold) == 0.0


def test_no_text_makes_the_verifier_raise():
    rng = random.Random(0)
    for _ in range(1000):
        answer, said = rng.choice(GOLDS), formula(rng, rng.choice([1, 2, 2]))
        assert answers_match(completion=rf"\boxed{{{said}}}", answer=answer) in (0.0, 1.0), said


def formula(rng, depth):
    if depth == 0:
        return rng.choice(LEAVES)
    form = rng.choice(FORMS)
    return form % tuple(formula(rng, depth - 1) for _ in range(form.count("%s")))


def test_running_out_of_memory_is_no_verdict(monkeypatch):
    def out_of_memory(*_, **__):
        raise MemoryError

    for function in ("verify", "latex2sympy"):  # in a comparison, and in the parser
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(symbolic, function, out_of_memory)
            answers_match(completion=rf"\boxed{{\sqrt{{5+2\sqrt{{6}}}}+{len(function)}}}", answer=r"\sqrt2+\sqrt{3}+6")


@pytest.mark.parametrize("answer", sorted({answer for answer, _, _ in BOXED}))
def test_every_reference_is_equal_to_itself(answer):
    assert answers_match(completion=rf"\boxed{{{answer}}}", answer=answer) == 1.0
    assert answers_match(completion=f"The answer is ${answer}$.", answer=answer) == 1.0


@pytest.mark.slow  # 20 s
def test_hostile_answers_are_wrong_within_the_deadline_and_the_pool_lives_on():
    with RewardPool("areal_jax.rewards.math_verdict:answers_match", timeout_s=4.0) as pool:
        took = {}
        for name, text in HOSTILE.items():
            for completion in (rf"\boxed{{{text}}}", text):
                began = time.monotonic()
                assert pool.score_now([completion], answer="x^2+1", prompt="") == [0.0], name
                took[name] = time.monotonic() - began
        assert max(took.values()) < 8, took  # the deadline, and a second process that also had to start
        assert pool.score_now([r"\boxed{1+x^2}", r"\boxed{1}"], answer="x^2+1", prompt="") == [1.0, 0.0]


def test_a_power_with_a_million_digits_or_a_tower_needs_no_kill():
    powers = ("10^{1000000}", "10^{10^6}", "9^{9^9}", "9^9^9", "(2^{10})^{100000}", "9^{9^{9^9}}")
    with RewardPool("areal_jax.rewards.math_verdict:answers_match", timeout_s=4.0) as pool:
        began = time.monotonic()
        assert pool.score_now([rf"\boxed{{{power}}}" for power in powers], answer="x", prompt="") == [0.0] * 6
        assert time.monotonic() - began < 5 and not pool.unanswered


def test_a_verification_that_hangs_costs_one_completion_of_its_group():
    with RewardPool("areal_jax.rewards.math_verdict:answers_match", timeout_s=1.5) as pool:
        group = [r"\boxed{x+x}", r"\boxed{\binom{1000000000}{500000000}}", r"\boxed{2x}", r"\boxed{3x}"]
        assert pool.score_now(group, answer="2x", prompt="") == [1.0, 0.0, 1.0, 0.0]
        assert pool.unanswered == {"reward_timeout": 1}


def test_no_text_of_a_model_is_ever_compiled_or_run(tmp_path):
    file = tmp_path / "injected"
    texts = [text.format(file=file) for text in INJECTIONS] + [said for _, said, _ in BOXED]
    result = subprocess.run(
        [sys.executable, "-c", WATCH],
        input="\0".join(texts),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert result.stdout == "[]\n", result.stderr
    assert not file.exists()


def test_importing_the_verifier_is_cheap():
    code = "import sys, areal_jax.rewards.math_verdict; print({'sympy', 'math_verify', 'numpy'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2]
    )
    assert result.stdout == "set()\n", result.stderr
