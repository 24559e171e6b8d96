"""`hansa explain` says which rules concern a file, and what they say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from test_cli import experiment as experiment  # the fixture
from test_cli import inside


def explained(path: Path, *sets: str) -> tuple[int, dict[str, Any]]:
    words = [word for change in sets for word in ("--set", change)]
    done = inside("explain", str(path), *words, "--json", cwd=path.parent)
    return done.returncode, {rule["rule"]: (rule["verdict"], rule["why"]) for rule in json.loads(done.stdout)["rules"]}


def test_rules_of_absent_parts_are_not_listed(experiment: Path) -> None:
    code, rules = explained(experiment)
    assert code == 0
    assert not any(word in name for name in rules for word in ("secure sum", "Central", "drift", "Fine-tuning"))


def test_a_broken_rule_gives_its_sentence_and_exit_code_1(experiment: Path) -> None:
    code, rules = explained(experiment, "privacy.secure=masking", "run.max_norm=3.0", "run.select=weighted")
    assert code == 1
    verdict, why = rules["A secure sum hides the norm of an update"]
    assert verdict == "broken" and why.endswith("have each party bound its own by privacy.bound")
    assert rules["A secure sum needs a blind selector"][0] == "broken"  # all broken rules are told, not only the first
    assert rules["A secure sum covers no messages between parties"] == ("met", "")


def test_a_rule_that_needs_more_is_decided_later(experiment: Path) -> None:
    code, rules = explained(experiment, "privacy.secure=masking", "run.min_cohort=3")
    assert code == 0
    assert rules["A secure sum is opened for so many parties"] == ("later", "needs: the number of parties of a round")
    assert rules["A secure sum cannot find the largest count"] == ("later", "needs: the model and the samples")


def test_without_json_it_is_a_table(experiment: Path) -> None:
    done = inside("explain", str(experiment), "--set", "run.compress_down=clip", cwd=experiment.parent)
    assert done.returncode == 1
    assert "broken" in done.stdout and "keeps the form" in " ".join(done.stdout.split())


def test_a_file_that_cannot_be_read_is_one_sentence(experiment: Path) -> None:
    done = inside("explain", "nowhere.toml", cwd=experiment.parent)
    assert done.returncode == 2 and "there is no file nowhere.toml" in done.stderr
