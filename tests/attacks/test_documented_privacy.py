"""Every configuration with differential privacy in the documentation keeps its epsilon, as far as canaries can tell.

The pages are searched for words of differential privacy. A block with such words is audited here, or is listed as one
that claims no epsilon of a run; a new block that is neither fails the first test.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hansa
from hansa.attacks.canaries import audit_epsilon
from hansa.attacks.recipe import recipe_of
from hansa.experiment.config import parse, read

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/docs"))
from docs_pages import Block, blocks  # noqa: E402

WORDS = re.compile(r"dp-sgd|DPSGD|CentralDP|\bdp\b *[=\"]|privacy\.dp|sigma|epsilon")
PRIVATE = re.compile(r"dp-sgd|\bdp\b|epsilon")  # in examples: some have noise in their data
# The first line of a block with one of these words, by page.
AUDITED = {
    ("docs/algorithms/trees.md", "algorithm = hansa.Boosting("),
    ("docs/experiments.md", 'dp = { kind = "central", epsilon = 3'),
    ("docs/howto/own-model.md", "private = hansa.FedAvg(local=hansa.local.DPSGD("),
    ("docs/privacy.md", 'local = { name = "dp-sgd", lr = 1.0'),
    ("docs/privacy.md", 'dp = { kind = "central", epsilon = 8'),
    ("docs/tables.md", 'local = { name = "dp-sgd", sigma = 1.0 }'),
}
OTHERS = {
    ("docs/algorithms/system.md", 'speed = { name = "lognormal"'): "times of parties",
    ("docs/deploy.md", "# epsilon = 3.0"): "the policy of a party, which sets a floor",
    ("docs/features.md", "hansa run examples/private.toml"): "an example, audited by its file",
    ("docs/howto/approve.md", "epsilon = 3.0"): "rules of approval",
    ("docs/privacy.md", "hansa privacy calibrate --epsilon 3"): "a computation without a run",
    ("docs/privacy.md", "epsilon = 3.0     # over all jobs"): "the policy of a party",
    ("docs/robustness.md", "hansa run hostile.toml"): "noise of an attacker",
}
EXAMPLES = ("private.toml", "private-parties.toml")
DIGITS = {"task": {"dataset": "digits", "model": "logistic"}, "run": {"rounds": 10}}


def private_blocks() -> dict[tuple[str, str], Block]:
    """The blocks of all pages with words of differential privacy, by page and by the first such line."""
    out: dict[tuple[str, str], Block] = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for block in blocks(page):
            line = next((line.strip() for line in block.text.splitlines() if WORDS.search(line)), None)
            if line is not None:
                out[str(page.relative_to(ROOT)), line] = block
    return out


def listed(key: tuple[str, str], known: Any) -> Any:
    """The entry of a block in one of the lists, which have the beginnings of lines; None if it is not there."""
    return next((entry for entry in known if entry[0] == key[0] and key[1].startswith(entry[1])), None)


def test_every_block_with_words_of_differential_privacy_is_audited_or_claims_nothing() -> None:
    found = list(private_blocks())
    assert [key for key in found if listed(key, [*AUDITED, *OTHERS]) is None] == []
    assert {listed(key, [*AUDITED, *OTHERS]) for key in found} == AUDITED | set(OTHERS)


def test_every_example_with_differential_privacy_is_audited() -> None:
    private = set[str]()
    for path in sorted((ROOT / "examples").glob("*.toml")):
        if PRIVATE.search(path.read_text()):
            private.add(path.name)
    assert private == set(EXAMPLES)


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for tree in trees:
        for name, table in tree.items():
            out[name] = {**out.get(name, {}), **table}
    return out


def simulated(experiment: Any) -> hansa.Result:
    """Simulate an experiment without its secure sum, which takes most of the time and changes sums by rounding."""
    settings = {**experiment.settings(), "privacy": hansa.Privacy(dp=experiment.privacy.dp)}
    return hansa.simulate(experiment.algorithm, experiment.build_task(), progress=False, **settings)


def of_block(key: tuple[str, str], block: Block, folder: Path) -> hansa.Result:
    """The run of a block; fragments of experiments are completed by a small task."""
    page = key[0]
    if block.language == "toml":
        tree = tomllib.loads(block.text)
        if "task" not in tree:
            parties = 10 if "local" in tree.get("algorithm", {}) else 100
            tree = merged(DIGITS, {"partition": {"name": "iid", "parties": parties}}, tree)
        else:
            write = next(each.text for each in blocks(ROOT / page) if 'open(f"{name}.csv", "w")' in each.text)
            exec(write, {})
            tree = merged(tree, {"task": {"party_test": 0.25}})  # canaries are samples that no party trains with
        return simulated(parse(tree, folder=str(folder)))
    names: dict[str, Any] = {"__name__": "page"}
    if page == "docs/howto/own-model.md":
        for each in blocks(ROOT / page):
            if each.language == "python" and each.line <= block.line and not each.text.startswith("# "):
                exec(each.text, names)
        result: hansa.Result = names["result"]
        return result
    exec("import hansa\n" + block.text, names)
    x, y = np.random.default_rng(0).normal(size=(600, 6)), np.arange(600) % 2
    x[:, 0] += y
    pairs = [(x[k:300:3], y[k:300:3]) for k in range(3)]
    task = hansa.Task(None, "cross_entropy", pairs, test=(x[300:], y[300:]), classes=2)
    return hansa.simulate(names["algorithm"], task, rounds=5, progress=False)


def audited(result: hansa.Result) -> dict[str, Any]:
    found = audit_epsilon(recipe_of(result))
    assert found["claimed"] is not None, "the configuration claims no epsilon"
    assert found["epsilon"] <= found["claimed"]
    rounds = found["all_rounds"]
    if "refused" not in rounds:
        assert rounds["epsilon"] <= found["claimed"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("entry", sorted(AUDITED), ids=lambda entry: f"{entry[0]}: {entry[1]}")
def test_the_lower_bound_of_epsilon_is_at_most_the_claimed_one_on_the_pages(
    entry: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ((key, block),) = [(key, block) for key, block in private_blocks().items() if listed(key, AUDITED) == entry]
    found = audited(of_block(key, block, tmp_path))
    assert found["unit"] == ("party" if "central" in entry[1] else "sample")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_lower_bound_of_epsilon_is_at_most_the_claimed_one_in_the_examples(name: str) -> None:
    found = audited(simulated(read(ROOT / "examples" / name)))
    assert found["unit"] == ("sample" if name == "private.toml" else "party") and found["claimed"] <= 8.0
