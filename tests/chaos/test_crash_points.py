"""A process that dies at a named point (after a flush, a rename, a commit, a model's save) loses no acknowledged data
and counts nothing twice: the job ends with the bits of the simulation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chaos_kit import AGGREGATOR, ALGORITHMS, Federation, simulated, write_experiment
from relay_kit import RELAYED

import hansa
from hansa.plumbing import crash_points as points
from hansa.testing import RecordedArrivals

SOURCE = Path(hansa.__file__).parent
# A point, and how often it is reached before the process dies; a process dies once per life, in this order.
SYNCHRONOUS = {
    AGGREGATOR: [
        ("private.fsync", 1), ("private.rename", 1), ("private.folder", 1), ("ledger.created", 1), ("mark.fsync", 1),
        ("mark.rename", 1), ("mark.folder", 1), ("ledger.execute", 1), ("ledger.commit", 1),
        ("job.submitted", 1), ("message.rename", 1), ("ask.opened", 1), ("upload.chunk", 1), ("blob.shelf", 1),
        ("blob.fsync", 1), ("blob.rename", 1), ("blob.folder", 1), ("reply.stored", 1), ("reply.written", 1),
        ("reply.acknowledged", 1), ("ask.closed", 2), ("message.rename", 3), ("reply.acknowledged", 3),
        ("reply.stored", 3), ("round.fused", 1), ("model.save", 1), ("blob.written", 1), ("blob.fsync", 2),
        ("model.saved", 1), ("ledger.execute", 12), ("ledger.commit", 14),
        ("round.closed", 1), ("blob.discarded", 3), ("round.closed", 2), ("job.model", 1),
        ("job.finished", 1),
    ],
    "north": [("private.fsync", 1), ("private.rename", 1), ("private.folder", 2), ("party.fetched", 1),
              ("party.trained", 3), ("upload.sent", 3)],
    "north-east": [("private.fsync", 6), ("rotation.certified", 1), ("rotation.key", 1), ("rotation.kept", 1),
                   ("rotation.certificate", 1), ("rotation.settled", 1), ("memory.fsync", 1),
                   ("memory.rename", 1), ("party.forgot", 2)],
    "south": [("private.folder", 1), ("receipts.folder", 1), ("receipt.fsync", 1), ("receipt.kept", 1),
              ("memory.folder", 1), ("party.received", 5), ("upload.sent", 2),
              ("party.trained", 2)],
}  # fmt: skip
ASYNCHRONOUS = {
    AGGREGATOR: [("reply.written", 4), ("ticket.taken", 1), ("reply.acknowledged", 3), ("ticket.taken", 2),
                 ("model.saved", 1), ("round.closed", 1), ("ticket.taken", 3), ("blob.discarded", 1),
                 ("job.finished", 1)],
    "north": [("memory.folder", 1), ("upload.sent", 2)],
    "north-east": [("party.fetched", 2), ("party.received", 2)],
    "south": [("party.trained", 2), ("memory.rename", 1)],
}  # fmt: skip


def test_every_named_point_is_in_the_code_and_every_point_in_the_code_is_named() -> None:
    found = {name for path in SOURCE.rglob("*.py") for name in re.findall(r'\breach\("([^"]*)"\)', path.read_text())}
    durable = [name for path in SOURCE.rglob("*.py") for name in re.findall(r'\bsteps\("([^"]*)"\)', path.read_text())]
    found |= {f"{name}.{step}" for name in durable for step in ("fsync", "rename", "folder")}
    assert found == set(points.NAMES)
    assert len(points.NAMES) == len(set(points.NAMES))


def test_after_every_flush_rename_and_commit_there_is_a_point() -> None:
    """Check that whole files are written by `disk.put` and `disk.publish`, which report each step, and that no code
    bypasses `plumbing.disk`. Exceptions: a federation's own files and the samples of an order from the live page are
    written before anything is acknowledged; the database is upgraded in one transaction (`tests/net/test_upgrade.py`);
    public samples that a party lost are fetched again (`tests/net/test_several_models.py`); `hansa export` writes a
    file for its user, who sees whether it ended (`disk.put(out, ...)`); payloads that a job keeps are written again
    when its round is replayed (`tests/net/test_kept_replies.py`); a party that lost its statement about its data makes
    it again.
    """
    durable = re.compile(r'disk\.(rename|flush|sync_folder)\(|"COMMIT"|blobs\.put\(')
    past = re.compile(r"os\.(fsync|replace|rename)\(")
    for path in (SOURCE / "net").rglob("*.py"):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            where = f"{path.name}, line {number + 1}: {line.strip()}"
            if path.name in ("federation.py", "schema.py", "admin_control.py", "public_store.py", "kept_replies.py",
                             "data_statement.py"):  # fmt: skip
                continue
            if durable.search(line):
                assert any("reach(" in after for after in lines[number + 1 : number + 3]), where
            if re.search(r"disk\.(put|publish)\((?!out,)", line):
                assert "steps(" in line, where
            assert not past.search(line), where


def test_somebody_dies_at_every_named_point() -> None:
    plans = (SYNCHRONOUS, ASYNCHRONOUS, RELAYED)
    planned = {point for plan in plans for dooms in plan.values() for point, _ in dooms}
    assert planned == set(points.NAMES)


def doomed(federation: Federation, plan: dict[str, list[tuple[str, int]]]) -> int:
    for name, dooms in plan.items():
        federation.members[name].dooms = list(dooms)
    return sum(len(dooms) for dooms in plan.values())


@pytest.mark.slow
def test_a_synchronous_job_survives_a_death_at_every_point(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        experiment = write_experiment(tmp_path, "job", ALGORITHMS["scaffold"], rounds=5)
        expected = doomed(federation, SYNCHRONOUS)
        federation.members["north-east"].first = ["--rotate"]
        job = federation.run(experiment, "job")
        assert federation.kills == expected
        federation.check(job, rounds=5)
        assert federation.model(job) == simulated(experiment, tmp_path / "run")
        federation.check_tidy([job])


@pytest.mark.slow
def test_an_asynchronous_job_survives_deaths_and_follows_the_stored_order(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        experiment = write_experiment(tmp_path, "job", ALGORITHMS["fedbuff"], rounds=6, run="cohort_size = 2")
        expected = doomed(federation, ASYNCHRONOUS)
        job = federation.run(experiment, "job")
        assert federation.kills == expected
        federation.check(job, rounds=6)
        clock = RecordedArrivals(federation.database, job)
        assert federation.model(job) == simulated(experiment, tmp_path / "run", clock)
        federation.check_tidy([job])
