"""The journal: a replay is answered from it; a replay with a different ask is an error."""

from pathlib import Path

import pytest
import torch

from hansa.core.ask import Ask
from hansa.local import SGD
from hansa.plumbing.errors import ReplayError
from hansa.replies.journal import Journal


def ask(index: int = 0, lr: float = 0.1, scale: float = 1.0) -> Ask:
    return Ask("reduce", 0, "round", index, op=SGD(lr=lr), payload={"w": torch.ones(3) * scale}, parties=(0, 1))


def test_a_journal_recalls_what_was_recorded_after_it_was_opened_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.record(ask(), {"0": {"reply": torch.arange(3.0)}})
    journal.close()
    again = Journal(tmp_path / "journal")
    found = again.recall(ask())
    assert found is not None and torch.equal(found["0"]["reply"], torch.arange(3.0))
    assert again.recall(ask(index=1)) is None
    again.close()


@pytest.mark.parametrize("other", [ask(lr=0.2), ask(scale=1.5)])
def test_a_replay_that_asks_something_else_fails_loudly(other: Ask) -> None:
    journal = Journal()
    journal.record(ask(), {"0": 1})
    with pytest.raises(ReplayError, match="round 0 asked something else"):
        journal.recall(other)


def test_a_torn_last_entry_is_dropped_and_the_journal_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.record(ask(0), {"0": 1})
    whole = path.stat().st_size
    journal.record(ask(1), {"0": 2})
    journal.close()
    with open(path, "rb+") as file:
        file.truncate(whole + 20)
    again = Journal(path)
    assert again.recall(ask(0)) == {"0": 1}
    assert again.recall(ask(1)) is None
    again.record(ask(1), {"0": 3})
    again.close()
    last = Journal(path)
    assert last.recall(ask(1)) == {"0": 3}
    last.close()
