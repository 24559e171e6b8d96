"""Jobs that keep their replies: what is stored, who allows it, how much, and until when."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from league import PARTIES, League, samples
from msgspec import structs

from hansa.experiment.config import parse
from hansa.net.aggregator.kept_replies import FULL, KeptReply, kept_replies
from hansa.net.aggregator.manifest import make_manifest
from hansa.net.aggregator.runtime import NetworkRuntime
from hansa.net.party.manifest_words import manifest_lines
from hansa.net.party.policy import Policy
from hansa.net.transport.manifest import decode_manifest, encode_manifest
from hansa.net.transport.wire import Blob, Work
from hansa.plumbing import disk
from hansa.plumbing.errors import ConfigError, DataError

ALLOWED = "keep_replies = true"
KEEP = {"keep_replies": True}


def tree(audit: dict[str, Any] | None = None, rounds: int = 2, **tables: Any) -> dict[str, Any]:
    run = {"rounds": rounds, "seed": 3, "eval_parties": False, **tables.pop("run", {})}
    out = {"task": {"parties": ["x"], "model": "logistic", "dtype": "float64"},
           "algorithm": {"name": "fedavg", "local": {"name": "sgd", "lr": 0.1}}, "run": run, **tables}  # fmt: skip
    return out | ({} if audit is None else {"audit": audit})


def everybody(league: League, policy: str = ALLOWED) -> None:
    for number, name in enumerate(PARTIES):
        league.join(name, samples(number, n=10 + number), policy)


def finished(league: League, order: dict[str, Any]) -> str:
    job = league.submit(order)
    ended = league.ended(job)
    assert ended["status"] == "finished", ended["reason"]
    return job


def rounds(league: League, job: str) -> dict[int, list[KeptReply]]:
    """The kept updates of each round."""
    out: dict[int, list[KeptReply]] = defaultdict(list)
    for reply in kept_replies(league.folder, job):
        if reply.phase == "round":
            out[reply.round].append(reply)
    return out


def test_the_kept_updates_give_the_models_of_the_job(league: League) -> None:
    everybody(league)
    job = finished(league, tree(KEEP, rounds=3))
    kept = rounds(league, job)
    assert {number: [reply.party for reply in replies] for number, replies in kept.items()} == {
        number: list(PARTIES) for number in range(3)
    }
    models = [kept[number][0].payload["model"]["w"] for number in range(3)]
    models.append(torch.cat([value.reshape(-1) for value in league.model(job)["params"].values()]))
    for number, replies in kept.items():
        assert [reply.reply.weight for reply in replies] == [10, 11, 12]
        assert all(torch.equal(reply.payload["model"]["w"], models[number]) for reply in replies)
        assert all(reply.op.name == "sgd" and reply.update is not None for reply in replies)
        mean = sum(reply.reply.weight * reply.update for reply in replies if reply.update is not None) / 33
        torch.testing.assert_close(models[number] + mean, models[number + 1], rtol=0, atol=1e-12)
    assert not torch.equal(models[0], models[3])


def test_replies_without_updates_are_kept_too_and_payloads_once(league: League) -> None:
    everybody(league)
    job = finished(league, tree(KEEP, rounds=1))
    every = list(kept_replies(league.folder, job))
    described = [reply for reply in every if reply.phase == "describe"]
    assert [reply.party for reply in described] == list(PARTIES) and described[0].update is None
    rows = league.ledger.all("SELECT sent FROM kept WHERE job = ? AND phase = 'round'", job)
    assert len(rows) == 3 and len({row["sent"] for row in rows}) == 1


@pytest.mark.parametrize("tables", [
    {"run": {"compress": "int8"}}, {"run": {"compress_down": "int8"}},
    {"algorithm": {"name": "fedbuff", "buffer": 2}}, {"algorithm": {"name": "fedavg", "fusion": "median"}},
], ids=str)  # fmt: skip
@pytest.mark.slow
def test_packed_updates_and_those_of_tickets_are_kept_readable(league: League, tables: dict[str, Any]) -> None:
    everybody(league)
    job = finished(league, tree(KEEP, **tables))
    updates = [reply for replies in rounds(league, job).values() for reply in replies]
    assert updates
    for reply in updates:
        assert reply.update is not None and reply.update.dtype == torch.float64
        assert reply.update.shape == reply.payload["model"]["w"].shape and bool(reply.update.abs().max() > 0)


def test_by_default_nothing_is_kept(league: League) -> None:
    everybody(league, "")
    job = finished(league, tree())
    assert not league.ledger.all("SELECT 1 FROM kept")
    assert len(list(league.aggregator.blobs)) == 1  # the model
    with pytest.raises(ConfigError, match=r"has no kept replies: it did not keep them; submit it with audit"):
        list(kept_replies(league.folder, job))
    with pytest.raises(ConfigError, match="there is no job 'other-1'"):
        list(kept_replies(league.folder, "other-1"))
    with pytest.raises(ConfigError, match="kept replies are in the folder of the aggregator"):
        list(kept_replies(league.folder / "homes", job))


def test_a_party_refuses_a_job_that_keeps_replies_unless_its_policy_allows_it(league: League) -> None:
    for number, name in enumerate(PARTIES):
        league.join(name, samples(number), ALLOWED if name != "bob" else "")
    job = finished(league, tree(KEEP))
    why = league.operator.job(job)["absent"]
    assert (
        list(why) == ["bob"]
        and "does not let the aggregator keep its replies (keep_replies in party.toml)" in (why["bob"])
    )
    assert {reply.party for reply in kept_replies(league.folder, job)} == {"ann", "cid"}


def test_a_policy_allows_other_jobs_whatever_it_says_of_kept_replies() -> None:
    blob = Blob("0" * 64, 1)
    work = Work("job-1", "job", 0, 0, "round", 0, blob, blob, None, None, None, 1)
    keeps = structs.replace(work, keeps=True)
    assert [Policy().refuses_work(ask) is None for ask in (work, keeps)] == [True, False]
    assert [Policy(keep_replies=True).refuses_work(ask) is None for ask in (work, keeps)] == [True, True]


def test_the_manifest_says_in_words_that_replies_are_kept_and_older_parties_can_read_others() -> None:
    made = [make_manifest("league", "job-1", "job", parse(tree(audit)), None, None, [("ann", None)])
            for audit in (None, KEEP)]  # fmt: skip
    assert b"keep_replies" not in encode_manifest(made[0])  # a version without the field refuses unknown fields
    words = [" ".join(manifest_lines(decode_manifest(encode_manifest(manifest)))) for manifest in made]
    assert "KEEPS every reply after the job, in readable form" in words[1] and "KEEPS" not in words[0]


def test_an_ask_that_keeps_what_the_approved_manifest_does_not_is_refused(
    league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = NetworkRuntime._offers

    def lying(self: NetworkRuntime, *given: Any) -> Any:
        made = offers(self, *given)
        for _, queued in made:
            if queued.work.phase == "round":
                queued.work = structs.replace(queued.work, keeps=True)
        return made

    monkeypatch.setattr(NetworkRuntime, "_offers", lying)
    everybody(league, f"{ALLOWED}\n[approve]\nmode = 'rules'\nrounds = 100")
    job = league.submit(tree())
    ended = league.ended(job)
    assert ended["status"] == "failed"
    assert "the approved manifest allows replies that are deleted after their round" in ended["reason"]


@pytest.mark.slow
def test_at_most_that_many_bytes_are_kept_and_whole_asks_alone(league: League) -> None:
    everybody(league)
    whole = finished(league, tree(KEEP, rounds=4))
    every = list(kept_replies(league.folder, whole))
    used = league.ledger.one("SELECT sum(size) AS n FROM kept WHERE job = ?", whole)
    assert used is not None
    files = {row[name] for row in league.ledger.all("SELECT reply, sent FROM kept WHERE job = ?", whole)
             for name in ("reply", "sent")}  # fmt: skip
    assert used["n"] >= sum(league.aggregator.blobs.path(digest).stat().st_size for digest in files)
    part = finished(league, tree({**KEEP, "keep_bytes": used["n"] * 8 // 10}, rounds=4, run={"seed": 4}))
    some = list(kept_replies(league.folder, part))
    assert 0 < len(some) < len(every) and len(some) % 3 == 0
    assert [(r.round, r.phase, r.party) for r in some] == [(r.round, r.phase, r.party) for r in every[: len(some)]]
    (event,) = league.events(FULL)
    assert event["job"] == part and "audit.keep_bytes" in event["detail"]
    needed = {row[name] for row in league.ledger.all("SELECT reply, sent FROM kept") for name in ("reply", "sent")}
    assert set(league.aggregator.blobs) == needed | {league.shown(job)["model"] for job in (whole, part)}


def test_little_room_on_the_disk_ends_the_keeping_and_not_the_job(league: League) -> None:
    everybody(league)
    league.aggregator.blobs.min_free = int(0.6 * disk.free(league.folder))
    job = finished(league, tree(KEEP))
    assert not league.ledger.all("SELECT 1 FROM kept WHERE job = ?", job)
    (event,) = league.events(FULL)
    assert "serve.min_free" in event["detail"]


def test_kept_replies_are_deleted_on_request_and_with_a_job_that_ends_without_a_model(league: League) -> None:
    everybody(league)
    job = finished(league, tree(KEEP))
    count = len(list(kept_replies(league.folder, job)))
    assert league.operator.forget(job) == count > 0
    assert league.operator.forget(job) == 0
    league.until(lambda: set(league.aggregator.blobs) == {league.shown(job)["model"]})
    with pytest.raises(ConfigError, match="has no kept replies: they were deleted"):
        list(kept_replies(league.folder, job))
    endless = league.submit(tree(KEEP, rounds=10**6))
    league.until(lambda: bool(league.shown(endless)["rounds"]))
    with pytest.raises(Exception, match="still runs and keeps its replies; stop it first"):
        league.operator.forget(endless)
    rows = league.ledger.all("SELECT reply, sent FROM kept WHERE job = ?", endless)
    kept = {row[name] for row in rows for name in ("reply", "sent")}
    assert kept and kept <= set(league.aggregator.blobs)
    league.operator.stop(endless)
    assert league.ended(endless)["status"] == "stopped"
    assert not league.ledger.all("SELECT 1 FROM kept WHERE job = ?", endless)
    league.until(lambda: not kept & set(league.aggregator.blobs))  # a party may be uploading another reply


@pytest.mark.slow
def test_a_job_that_is_resumed_keeps_every_reply_once(league: League) -> None:
    everybody(league)
    job = league.submit(tree(KEEP, rounds=6))
    league.until(lambda: len(league.shown(job)["rounds"]) >= 2)
    league.stop()
    league.start()
    assert league.ended_after_all(job)["status"] == "finished"
    kept = rounds(league, job)
    assert {number: [reply.party for reply in replies] for number, replies in kept.items()} == {
        number: list(PARTIES) for number in range(6)
    }


def test_a_damaged_reply_is_named(league: League) -> None:
    everybody(league)
    job = finished(league, tree(KEEP, rounds=1))
    row = league.ledger.one("SELECT reply FROM kept WHERE phase = 'round' AND party = 1")
    assert row is not None
    path: Path = league.aggregator.blobs.path(row["reply"])
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"\x00\x01"[: 1 + (path.read_bytes()[-1] == 0)][-1:])
    with pytest.raises(DataError, match="the kept reply of round 0, round 0, bob is damaged"):
        list(kept_replies(league.folder, job))


@pytest.mark.parametrize(("tables", "message"), [
    ({"privacy": {"secure": "masking"}}, "the secure sum 'masking' hides every single reply"),
    ({"algorithm": {"name": "d-psgd"}}, "parties of d-psgd seal their messages for each other"),
], ids=["secure", "route"])  # fmt: skip
def test_where_nothing_readable_would_be_stored_the_setting_is_refused(tables: dict[str, Any], message: str) -> None:
    parse(tree(None, **tables))
    with pytest.raises(ConfigError, match=message):
        parse(tree(KEEP, **tables))


def test_settings_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(ConfigError, match="keep_bytes = 10 has no effect while keep_replies is false"):
        parse(tree({"keep_bytes": 10}))
    with pytest.raises(ConfigError, match="keep_bytes must be at least 1"):
        parse(tree({**KEEP, "keep_bytes": 0}))
    with pytest.raises(ConfigError, match="a simulation can be repeated"):
        parse(tree(KEEP)).settings()
    assert parse(tree({"keep_replies": False})).settings()
