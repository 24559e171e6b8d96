from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutations import mutants_of

TOOL = Path(__file__).with_name("mutants.py")
TOY = '''"""A toy."""

import functools

STEP = 2


def area(width: int, height: int) -> int:
    return width * height


@functools.lru_cache
def untested(a: float, b: float) -> float:
    return a + b


def unreached(a: float) -> float:
    return -a


def rounds(n: int) -> int:
    count = 0
    while count < n:
        count += STEP
    return count
'''
TESTS = """import subprocess
import sys

import toy


def test_area():
    assert toy.area(3, 4) == 12


def test_untested():
    toy.untested(1.0, 2.0)


def test_rounds():
    assert toy.rounds(4) == 4


def test_that_starts_a_program():
    command = [sys.executable, "-c", "import toy; print(toy.untested(1.0, 2.0))"]
    assert float(subprocess.run(command, capture_output=True).stdout) == toy.untested(1.0, 2.0)
"""


def run(folder: Path, *options: str, tests: str = TESTS) -> subprocess.CompletedProcess[str]:
    folder.joinpath("toy.py").write_text(TOY)
    folder.joinpath("test_toy.py").write_text(tests)
    command = [sys.executable, str(TOOL), "toy.py", "--tests", "test_toy.py", "--patience", "3", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


def changes(folder: Path, source: str) -> list[tuple[str, str]]:
    path = folder / "formula.py"
    path.write_text(source)
    return [(mutant.before, mutant.after) for mutant in mutants_of(path)]


@pytest.mark.slow
def test_survivors_are_the_changes_that_no_test_notices(tmp_path: Path) -> None:
    done = run(tmp_path, "--jobs", "2")
    assert done.returncode == 0, done.stderr
    survivors = [line for line in done.stdout.splitlines() if "->" in line]
    assert survivors == [
        "toy.py:14: return a + b  ->  return a - b",
        "toy.py:14: return a + b  ->  return a",
        "toy.py:14: return a + b  ->  return b",
        "toy.py:18: return -a  ->  return a  (no test reaches this line)",
    ]
    # Noticed: STEP = 3, width / height, and four changes of rounds(), of which `count -= STEP` never ends.
    assert done.stdout.splitlines()[-1].split() == ["all", "10", "5", "1", "4", "60.0"]
    assert tmp_path.joinpath("toy.py").read_text() == TOY


@pytest.mark.slow
def test_the_same_seed_gives_the_same_sample(tmp_path: Path) -> None:
    first, again = (run(tmp_path, "--sample", "3", "--seed", "5") for _ in range(2))
    assert first.stdout == again.stdout
    assert first.stdout.splitlines()[-1].split()[:2] == ["all", "3"]


def test_tests_that_fail_on_the_unchanged_code_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, tests=TESTS.replace("== 12", "== 13"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("mutants: the tests above fail")


def test_a_module_that_does_not_exist_is_refused_with_a_sentence(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(TOOL), "absent.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("mutants: absent.py has no formula to mutate") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("expression", "mutants"),
    [
        ("a - b", ["a + b", "a"]),
        ("a * b", ["a / b"]),
        ("a < b", ["a <= b", "a >= b"]),
        ("a <= b", ["a < b", "a > b"]),
        ("a == b", ["a != b"]),
        ("a is None", []),
        ("a and b", ["a or b"]),
        ("not a", ["a"]),
        ("0.5", ["1.0"]),
        ("0.0", ["1.0"]),
        ("3", ["4"]),
        ("True", []),
        ("min(a, b)", ["max(a, b)"]),
        ("sum(a)", []),
        ("a.sum()", ["a.mean()"]),
        ("a.clamp(min=b)", ["a.clamp(max=b)"]),
        ("isinstance(a, int | float)", []),
        ("f'{a + b}'", []),
    ],
)
def test_mutants_of_an_expression(tmp_path: Path, expression: str, mutants: list[str]) -> None:
    source = f"def f(a, b):\n    return {expression}\n"
    assert changes(tmp_path, source) == [(f"return {expression}", f"return {mutant}") for mutant in mutants]


def test_annotations_decorators_and_error_messages_are_not_mutated(tmp_path: Path) -> None:
    source = """@cache(maxsize=8)
def f(a: int | float, b: Literal[1] = 2) -> Literal[3]:
    c: Literal[4] = a
    if a > b:
        raise ValueError(a + b)
    assert c == 1
    return c
"""
    assert changes(tmp_path, source) == [("2", "3"), ("a > b", "a >= b"), ("a > b", "a <= b")]
