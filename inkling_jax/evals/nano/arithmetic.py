"""Sums, differences and products, thought through digit by digit; how much is thought depends on the effort."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

from inkling_jax.evals.nano.example import EFFORTS, Example, Given, Source, conversation
from inkling_jax.inputs.messages import parse_effort

PHRASINGS = (
    "What is {a} {sign} {b}?",
    "{a} {sign} {b}",
    "{a}{sign}{b}",
    "{a} {sign} {b} =",
    "Calculate {a} {sign} {b}.",
    "What is {a} {word} {b}?",
    "How much is {a} {word} {b}?",
    "Please work out {a} {word} {b}.",
)
WORDS = {"+": "plus", "-": "minus", "*": "times"}
PLACES = ("ones", "tens", "hundreds", "thousands")


class Problem(NamedTuple):
    """Two operands below 1000 and a sign; the first of a product is below 100, the second below 10."""

    a: int
    sign: str
    b: int

    @property
    def result(self) -> int:
        """The number asked for."""
        return self.a + self.b if self.sign == "+" else self.a - self.b if self.sign == "-" else self.a * self.b


def draw_problem(rng: random.Random) -> Problem:
    """Operands of one to three digits, each number of digits as often."""
    sign = rng.choice("+-*")
    if sign == "*":
        return Problem(rng.randrange(10 ** rng.randint(1, 2)), sign, rng.randrange(10))
    a, b = (rng.randrange(10 ** rng.randint(1, 3)) for _ in range(2))
    if sign == "-" and a < b and rng.random() < 0.8:
        a, b = b, a
    return Problem(a, sign, b)


def make_arithmetic(source: Source) -> Example:
    """A problem with visible thinking: low, medium or high effort, the last being what is taken where none is named."""
    return _example("arithmetic", source, draw_problem, source.random.choice([None, "low", "medium", "high"]))


def make_effort(source: Source) -> Example:
    """A problem at any effort by name or number; without effort, one small enough to answer at once."""
    rng = source.random
    effort = rng.choice(EFFORTS) if rng.random() < 0.7 else rng.randrange(100) / 100
    return _example("effort", source, draw_problem if steps(effort) else draw_small, effort)


def draw_small(rng: random.Random) -> Problem:
    """A problem that is answered without thinking: sums and differences below 100, products of digits."""
    while True:
        problem = draw_problem(rng)
        if problem.a < (10 if problem.sign == "*" else 100) and problem.b < 100:
            return problem


def grade_arithmetic(example: Example, given: Given) -> bool:
    """Whether the answer's last number is the result."""
    numbers = re.findall(r"-?\d+", given.content)
    return bool(numbers) and int(numbers[-1]) == example.answer


def grade_effort(example: Example, given: Given) -> bool:
    """Whether the result is right and as much was thought as the effort asks for: a band around the form's own length."""
    expected = example.messages[-1].get("reasoning_content", "")
    near = 0.75 * len(expected) <= len(given.reasoning) <= 1.25 * len(expected)
    return near and grade_arithmetic(example, given)


def steps(effort: str | float | None) -> int:
    """How much is thought: 0 nothing, 1 the columns, 2 what is written and carried as well, 3 a check at the end too."""
    value = parse_effort(effort)
    return 0 if value < 0.05 else 1 if value < 0.5 else 2 if value < 0.8 else 3


def thinking(problem: Problem, level: int) -> str:
    """The thoughts about a problem at a level of `steps`."""
    if not level:
        return ""
    a, sign, b = problem
    if sign == "-" and a < b:
        return f"{a}<{b}, so minus {b}-{a}. " + thinking(Problem(b, sign, a), level)
    lines = {"+": _sum, "-": _difference, "*": _product}[sign](a, b, level > 1)
    text = " ".join(lines)
    if level < 3:
        return text
    if sign == "*":
        parts = [f"{a // 10}0*{b}={a // 10 * 10 * b}", f"{a % 10}*{b}={a % 10 * b}"] if a > 9 else [f"{b}*{a}={a * b}"]
        return f"{text} Check: {', '.join(parts)}, {problem.result}."
    result = problem.result
    back = _difference(result, b, False) if sign == "+" else _sum(result, b, False)
    return f"{text} Check {result}{'-' if sign == '+' else '+'}{b}: {' '.join(back)} That is {a}."


def _sum(a: int, b: int, wordy: bool) -> list[str]:
    lines, carry = [], 0
    for n in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**n % 10, b // 10**n % 10
        total = x + y + carry
        line = f"{x}+{y}{f'+{carry}' if carry else ''}={total}"
        carry = total // 10
        lines.append(f"{PLACES[n]}: {line}, write {total % 10}, carry {carry}." if wordy else f"{line}.")
    return lines


def _difference(a: int, b: int, wordy: bool) -> list[str]:
    """Of the greater less the smaller."""
    lines, borrow = [], 0
    for n in range(len(str(a))):
        x, y = a // 10**n % 10, b // 10**n % 10
        short = x < y + borrow
        line = f"{x + 10 * short}-{y}{f'-{borrow}' if borrow else ''}={x + 10 * short - y - borrow}"
        borrow = int(short)
        lines.append(f"{PLACES[n]}: {x}, {line}, borrow {borrow}." if wordy else f"{line}.")
    return lines


def _product(a: int, b: int, wordy: bool) -> list[str]:
    lines, carry = [], 0
    for n in range(len(str(a))):
        x = a // 10**n % 10
        total = x * b + carry
        line = f"{x}*{b}{f'={x * b}+{carry}' if carry else ''}={total}"
        carry = total // 10
        lines.append(f"{PLACES[n]}: {line}, write {total % 10}, carry {carry}." if wordy else f"{line}.")
    return lines


def _example(task: str, source: Source, draw, effort: str | float | None) -> Example:
    problem = source.question(draw)
    a, sign, b = problem
    asked = source.random.choice(PHRASINGS).format(a=a, b=b, sign=sign, word=WORDS[sign])
    answer = {"role": "assistant", "content": f"{a} {sign} {b} = {problem.result}"}
    thought = thinking(problem, steps(effort))
    if thought:
        answer["reasoning_content"] = thought
    return Example(task, conversation(asked, answer), effort=effort, answer=problem.result)
