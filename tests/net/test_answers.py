"""Answers are stored once; uploads and downloads resume where they stopped, and their content is verified."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from league import PATIENCE, SPOKEN, Asked, Caller, League, draft
from msgspec import structs

from hansa.net.aggregator import asks
from hansa.net.aggregator.blobs import Blobs, Gap
from hansa.net.aggregator.job_records import discard, needed_blobs
from hansa.net.aggregator.ledger import Writer
from hansa.net.transport import signing
from hansa.net.transport.client import Client
from hansa.net.transport.signing import About
from hansa.net.transport.tls import client_context
from hansa.net.transport.wire import CHUNK, Blob, Order, pack
from hansa.plumbing.errors import DataError


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def parts(league: League) -> list[Path]:
    return sorted((league.folder / "state" / "uploads").iterdir())


def speaker(league: League, caller: Caller) -> Client:
    """The package's client, with a caller's certificate."""
    assert caller.files is not None
    return Client(league.url, client_context(league.folder / "ca.pem", *caller.files), caller.key, patience=0)


# Exactly once


def test_the_same_answer_gets_the_same_receipt_and_another_is_refused_and_logged(league: League, ann: Caller) -> None:
    ask = league.ask()
    answer = draft(ann.upload(ask, b"one"))
    first = ann.reply(ask, answer)
    assert first.status == 200 and first.receipt.status == "accepted"
    assert ann.reply(ask, answer).body == first.body
    for other in (draft(Blob(digest(b"two"), 3)), draft(why="it would rather not")):
        got = ann.reply(ask, other)
        assert got.status == 409 and "the first answer stands" in got.error
    assert ann.reply(ask, answer).body == first.body
    (row,) = league.replies(ask).values()
    assert row["blob"] == digest(b"one") and row["party"] == 0
    assert [entry["party"] for entry in league.events("conflict")] == ["ann", "ann"]
    league.close_ask(ask)
    assert ann.reply(ask, answer).body == first.body
    league.stop()
    league.start()
    again = league.caller(ann.key, ann.files, "ann")
    assert again.reply(ask, answer).body == first.body
    assert again.reply(ask, draft(why="no")).status == 409


def test_an_accepted_answer_beyond_the_cohort_keeps_its_receipt(league: League, ann: Caller) -> None:
    """The answer was acknowledged, and then others completed the cohort."""
    bob, ask = league.enrolled("bob"), league.ask()
    bob.reply(ask, draft(bob.upload(ask, b"first")))
    answer = draft(ann.upload(ask, b"second"))
    first = ann.reply(ask, answer)
    closed = league.ledger.now(asks.close_ask(ask.key, 1, {}))
    assert closed.members == (1,) and "complete before" in closed.missing[0]
    assert ann.reply(ask, answer).body == first.body


def test_a_late_answer_is_told_so_and_not_kept(league: League, ann: Caller) -> None:
    ask = league.ask()
    answer = draft(ann.upload(ask, b"late"))
    league.close_ask(ask, {0: "it did not answer"})
    got = ann.reply(ask, answer)
    assert got.status == 200 and got.receipt.status == "late"
    assert ann.reply(ask, answer).body == got.body
    assert league.replies(ask) == {} and digest(b"late") not in league.aggregator.blobs
    assert ann.put(ask, digest(b"late"), 0, b"late").status == 404


def test_an_answer_whose_bytes_another_job_has_just_let_go_of_is_sent_again(league: League, ann: Caller) -> None:
    looks = []

    def check(path: Path, answer: object) -> None:
        looks.append(path.name)
        if len(looks) == 1:  # the same bytes belong to another job, whose round closes now
            discard(league.ledger, league.aggregator.blobs, looks)
        path.read_bytes()

    ask = league.ask(check=check)
    answer = draft(ann.upload(ask, b"the same"))
    got = ann.reply(ask, answer)
    assert got.status == 416 and got.headers["Hansa-At"] == "0" and league.replies(ask) == {}
    ann.upload(ask, b"the same")
    assert ann.reply(ask, answer).receipt.status == "accepted" and len(looks) == 2


def test_an_answer_to_what_was_not_asked_is_404_and_leaves_nothing(league: League, ann: Caller) -> None:
    ask, other = league.ask(parties=(0,)), league.ask(round=3, parties=(1, 2))
    blob = ann.upload(ask, b"bytes")
    for asked in (other, Asked("job-9"), Asked(number=7), Asked(phase="select"), Asked(round=99)):
        got = ann.reply(asked, draft(blob))
        assert got.status == 404 and "ann was not asked" in got.error
    assert list(league.aggregator.blobs) == [] and league.replies(other) == {}


def test_an_answer_without_its_upload_is_416_and_says_where_it_stands(league: League, ann: Caller) -> None:
    ask, data = league.ask(), b"0123456789"
    blob = Blob(digest(data), len(data))
    got = ann.reply(ask, draft(blob))
    assert got.status == 416 and got.headers["Hansa-At"] == "0"
    assert ann.put(ask, blob.digest, 0, data[:4]).headers["Hansa-At"] == "4"
    got = ann.reply(ask, draft(blob))
    assert got.status == 416 and got.headers["Hansa-At"] == "4"
    ann.put(ask, blob.digest, 4, data[4:])
    assert ann.reply(ask, draft(blob)).receipt.status == "accepted"


def test_bytes_without_the_right_hash_are_refused_and_can_be_sent_again(league: League, ann: Caller) -> None:
    ask, data = league.ask(), b"right bytes"
    blob = Blob(digest(data), len(data))
    assert ann.put(ask, blob.digest, 0, b"wrong bytes").status == 204
    got = ann.reply(ask, draft(blob))
    assert got.status == 416 and "send them again" in got.error
    assert parts(league) == [] and blob.digest not in league.aggregator.blobs
    for size in (len(data) - 1, len(data) + 1):  # the hash is right, the length is not
        ann.upload(ask, data)
        assert ann.reply(ask, draft(Blob(blob.digest, size))).status in (400, 416)
    ann.upload(ask, data)
    assert ann.reply(ask, draft(blob)).receipt.status == "accepted"


NO_WEIGHT = pack(structs.replace(draft(Blob("ab" * 32, 1)), weight=None))


@pytest.mark.parametrize("body", [b"", b"\xc1", pack(draft()), pack(draft(Blob("ab" * 32, 1), why="both")), NO_WEIGHT])
def test_what_is_no_answer_is_refused(league: League, ann: Caller, body: bytes) -> None:
    ask = league.ask()
    got = ann.call("POST", f"{ask.path}/reply", body, ask.about)
    assert got.status == 400 and league.replies(ask) == {}


def test_a_digest_with_a_line_break_is_none(league: League, ann: Caller) -> None:
    ask = league.ask()
    answer = pack(draft(Blob("ab" * 32 + "\n", 1)))
    got = ann.call("POST", f"{ask.path}/reply", answer, ask.about)
    assert got.status == 400 and "not a valid Answer" in got.error


def test_a_party_cannot_answer_for_another_nor_with_what_another_sent(league: League, ann: Caller) -> None:
    """A client that guesses the hash of another party's reply learns nothing about it and cannot submit it as its
    own."""
    bob, ask = league.enrolled("bob"), league.ask()
    blob = bob.upload(ask, b"bob's")
    assert bob.reply(ask, draft(blob)).status == 200
    for _ in range(2):
        assert ann.call("GET", f"{ask.path}/parts/{blob.digest}").headers["Hansa-At"] == "0"
        got = ann.reply(ask, draft(blob))
        assert got.status == 416 and got.headers["Hansa-At"] == "0"
    assert list(league.replies(ask)) == [1]
    ann.upload(ask, b"bob's")
    assert ann.reply(ask, draft(blob)).receipt.party == "ann"
    assert sorted(league.replies(ask)) == [0, 1]


# Uploads


def test_an_upload_goes_on_after_a_cut_in_the_middle(league: League, ann: Caller) -> None:
    ask, data = league.ask(), os.urandom(2 * CHUNK + 100)
    blob = Blob(digest(data), len(data))
    assert ann.put(ask, blob.digest, 0, data[:CHUNK]).status == 204
    path = f"{ask.path}/parts/{blob.digest}?at={CHUNK}"
    body = data[CHUNK : 2 * CHUNK]
    signed = signing.sign(ann.key, "PUT", path, body, ask.about)  # type: ignore[arg-type]
    ann.connection.putrequest("PUT", path)
    for name, value in {"Hansa-Protocol": SPOKEN, **signed, "Content-Length": str(len(body))}.items():
        ann.connection.putheader(name, value)
    ann.connection.endheaders()
    ann.connection.send(body[: CHUNK // 2])
    ann.close()  # the connection breaks
    assert ann.call("GET", f"{ask.path}/parts/{blob.digest}").headers["Hansa-At"] == str(CHUNK)
    league.stop()
    league.start()  # and the aggregator was restarted
    again = league.caller(ann.key, ann.files, "ann")
    league.ask()
    sent: list[str] = []

    async def go_on() -> None:
        async with speaker(league, again) as client:
            call = client.call

            async def watched(method: str, path: str, *given: object, **more: object) -> object:
                sent.append(f"{method} {path.rpartition('?')[2]}")
                return await call(method, path, *given, **more)  # type: ignore[arg-type]

            client.call = watched  # type: ignore[method-assign, assignment]
            await client.send(f"{ask.path}/parts", blob, memoryview(data), ask.about)

    asyncio.run(go_on())
    assert sent[1:] == [f"PUT at={CHUNK}", f"PUT at={2 * CHUNK}"]
    assert again.reply(ask, draft(blob)).receipt.status == "accepted"
    assert league.aggregator.blobs.path(blob.digest).read_bytes() == data


def test_a_chunk_again_changes_nothing_and_one_with_a_gap_says_where_to_go_on(league: League, ann: Caller) -> None:
    ask, data = league.ask(), b"abcdefgh"
    name = digest(data)
    assert ann.put(ask, name, 0, data[:4]).headers["Hansa-At"] == "4"
    assert ann.put(ask, name, 0, data[:4]).headers["Hansa-At"] == "4"
    assert ann.put(ask, name, 2, data[2:4]).headers["Hansa-At"] == "4"
    for at in (2, 5, 1000):  # an overlap that goes on, and gaps
        got = ann.put(ask, name, at, data[2:])
        assert got.status == 416 and got.headers["Hansa-At"] == "4" and "continue from there" in got.error
    assert ann.put(ask, name, 4, data[4:]).headers["Hansa-At"] == "8"
    assert ann.reply(ask, draft(Blob(name, 8))).status == 200
    assert league.aggregator.blobs.path(name).read_bytes() == data


def test_a_chunk_that_comes_too_early_waits_for_the_one_before(league: League, ann: Caller) -> None:
    ask, data, blobs = league.ask(), os.urandom(2**20), league.aggregator.blobs
    early, append = threading.Event(), blobs.append

    def watched(*given: Any) -> int:
        try:
            return append(*given)
        except Gap:
            early.set()
            raise

    blobs.append = watched  # type: ignore[method-assign]
    other = league.caller(ann.key, ann.files, "ann")
    half, name = len(data) // 2, digest(data)
    second: list[str] = []
    sender = threading.Thread(target=lambda: second.append(other.put(ask, name, half, data[half:]).headers["Hansa-At"]))
    sender.start()
    assert early.wait(30)
    assert ann.put(ask, name, 0, data[:half]).status == 204
    sender.join()
    assert second == [str(len(data))]
    assert ann.reply(ask, draft(Blob(name, len(data)))).receipt.status == "accepted"
    assert blobs.path(name).read_bytes() == data


def test_a_large_chunk_with_another_hash_than_the_signed_one_is_refused(league: League, ann: Caller) -> None:
    ask, data = league.ask(), bytes(2**20)
    path = f"{ask.path}/parts/{digest(data)}?at=0"
    signed = signing.sign(ann.key, "PUT", path, data, ask.about)  # type: ignore[arg-type]
    got = ann.call("PUT", path, data[:-1] + b"x", headers=signed)
    assert got.status == 401 and parts(league) == []


def test_an_upload_over_the_limit_leaves_nothing_on_the_disk(league: League, ann: Caller) -> None:
    ask, name = league.ask(limit=10), "ab" * 32
    got = ann.put(ask, name, 0, b"x" * 11)
    assert got.status == 400 and "longer than the limit of 10 bytes" in got.error and parts(league) == []
    assert ann.put(ask, name, 0, b"x" * 10).status == 204
    assert ann.put(ask, name, 10, b"x").status == 400
    assert parts(league) == []
    assert ann.put(ask, name, 0, b"x" * 10).status == 204


def test_a_party_has_one_upload_at_a_time_and_does_not_touch_anothers(found: Callable[..., League]) -> None:
    league = found(parties=("site", "site-1", "site-1.2"))
    callers = [league.enrolled(name) for name in ("site", "site-1", "site-1.2")]
    ask = league.ask()
    for caller in reversed(callers):  # the longest name first: its file's name begins as the others'
        caller.put(ask, "ab" * 32, 0, b"half")
        caller.put(ask, "cd" * 32, 0, b"half")
    assert len(parts(league)) == 3
    for caller in callers:
        assert caller.call("GET", f"{ask.path}/parts/{'ab' * 32}").headers["Hansa-At"] == "0"
        assert caller.call("GET", f"{ask.path}/parts/{'cd' * 32}").headers["Hansa-At"] == "4"


def test_two_parties_may_send_the_same_bytes_at_once(league: League, ann: Caller) -> None:
    bob, ask, data = league.enrolled("bob"), league.ask(), b"the same"
    blob = Blob(digest(data), len(data))
    ann.put(ask, blob.digest, 0, data[:3])
    bob.put(ask, blob.digest, 0, data)
    ann.put(ask, blob.digest, 3, data[3:])
    assert [c.reply(ask, draft(blob)).receipt.status for c in (bob, ann)] == ["accepted", "accepted"]
    assert list(league.aggregator.blobs) == [blob.digest]


def test_a_blob_that_is_discarded_as_the_same_bytes_come_in_is_asked_for_again(league: League, ann: Caller) -> None:
    """The upload is complete and about to be stored; at that moment the last other use of these bytes ends."""
    bob, ask, blobs = league.enrolled("bob"), league.ask(), league.aggregator.blobs
    blob = bob.upload(ask, b"the same")
    bob.reply(ask, draft(blob))
    ann.upload(ask, b"the same")
    hold, held = threading.Event(), threading.Event()

    def wait(db: Writer) -> None:
        held.set()
        assert hold.wait(PATIENCE)
        db.run("UPDATE replies SET spent = 1 WHERE party = 1")

    league.ledger.write(wait)
    assert held.wait(PATIENCE)
    finished = blobs.finish

    def finish(*given: object) -> Path:
        path = finished(*given)  # type: ignore[arg-type]
        done.append(threading.Thread(target=discard, args=(league.ledger, blobs, [blob.digest])))
        done[0].start()
        while league.ledger._queue.empty():
            pass
        hold.set()
        done[0].join()
        return path

    done: list[threading.Thread] = []
    blobs.finish = finish  # type: ignore[method-assign]
    got = ann.reply(ask, draft(blob))
    blobs.finish = finished  # type: ignore[method-assign]
    assert got.status == 416 and got.headers["Hansa-At"] == "0" and blob.digest not in blobs
    ann.upload(ask, b"the same")
    assert ann.reply(ask, draft(blob)).status == 200
    discard(league.ledger, blobs, [blob.digest])
    assert blob.digest in blobs and needed_blobs(league.ledger) == {blob.digest}


def test_blobs_of_many_owners_at_once_are_whole(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    data = [os.urandom(5000 + k) for k in range(8)]

    def send(owner: int) -> None:
        for k in range(8):
            mine = data[(owner + k) % 8]
            for at in range(0, len(mine), 1000):
                blobs.append(f"party.p{owner}", digest(mine), at, mine[at : at + 1000], 10_000)
            blobs.finish(f"party.p{owner}", digest(mine), len(mine))

    threads = [threading.Thread(target=send, args=(owner,)) for owner in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(blobs) == {digest(mine) for mine in data}
    assert all(digest(blobs.path(name).read_bytes()) == name for name in blobs)
    assert blobs._hashes == {} and list((tmp_path / "uploads").iterdir()) == []
    assert blobs.sweep({digest(data[0])}) == 7 and list(blobs) == [digest(data[0])]


def test_an_upload_whose_hash_was_forgotten_is_read_again(tmp_path: Path) -> None:
    data = b"x" * 100 + b"y" * 100
    Blobs(tmp_path).append("party.a", digest(data), 0, data[:100], 1000)
    blobs = Blobs(tmp_path)  # after a restart
    assert blobs.received("party.a", digest(data)) == 100
    blobs.append("party.a", digest(data), 100, data[100:], 1000)
    assert Blobs(tmp_path).finish("party.a", digest(data), 200).read_bytes() == data
    with pytest.raises(Gap):
        blobs.finish("party.b", digest(data), 200)


# The operator's uploads


def test_the_same_order_again_is_the_same_job(league: League) -> None:
    chief, data = league.chief(), b"samples"
    blob = Blob(digest(data), len(data))
    tree = {"task": {"dataset": "heart", "model": "logistic"}, "run": {"rounds": 1}}
    order = pack(Order("one", tree, blob, None, "mark"))
    path = f"/v1/uploads/{blob.digest}"
    got = chief.call("POST", "/v1/jobs", order, About())
    assert got.status == 416
    assert chief.call("PUT", f"{path}?at=0", data, About()).status == 204
    assert chief.call("GET", path).headers["Hansa-At"] == str(len(data))
    first = chief.call("POST", "/v1/jobs", order, About())
    assert first.status == 200
    assert chief.call("POST", "/v1/jobs", order, About()).body == first.body  # the answer was lost
    league.until(lambda: league.events("job failed") or league.events("job ended"))
    assert chief.call("POST", "/v1/jobs", order, About()).body == first.body  # also when the job is over
    chief.call("PUT", f"{path}?at=0", data, About())
    other = chief.call("POST", "/v1/jobs", pack(Order("one", tree, blob, None, "other mark")), About())
    assert other.status == 200 and other.body != first.body
    assert len(league.events("job submitted")) == 2


@pytest.mark.parametrize("min_parties", [0, 4])
def test_an_order_that_cannot_be_filled_is_refused(league: League, min_parties: int) -> None:
    tree = {"task": {"dataset": "heart", "model": "logistic"}}
    got = league.chief().call("POST", "/v1/jobs", pack(Order("one", tree, None, min_parties)), About())
    assert got.status == 400 and "min_parties must lie in 1..3" in got.error


# Downloads


def test_a_download_is_of_ranges_and_goes_on_where_it_stopped(league: League, ann: Caller, tmp_path: Path) -> None:
    data = os.urandom(2 * CHUNK + 5)
    ask = league.ask(message=data)
    got = ann.call("GET", f"{ask.path}/message", headers={"Range": "bytes=3-6"})
    assert got.status == 206 and got.body == data[3:7]
    assert ann.call("GET", f"{ask.path}/message", headers={"Range": f"bytes={len(data)}-"}).status == 416
    into, asked = tmp_path / "message", []
    into.write_bytes(data[: CHUNK + 7])

    async def fetch(blob: Blob) -> None:
        async with speaker(league, ann) as client:
            call = client.call

            async def watched(*given: object, **more: object) -> object:
                asked.append(more["headers"])
                return await call(*given, **more)  # type: ignore[arg-type]

            client.call = watched  # type: ignore[method-assign, assignment]
            await client.fetch(f"{ask.path}/message", blob, into)

    asyncio.run(fetch(Blob(digest(data), len(data))))
    assert into.read_bytes() == data
    assert asked == [{"Range": f"bytes={CHUNK + 7}-{2 * CHUNK + 4}"}]
    into.write_bytes(data + b"and more than there is")
    asyncio.run(fetch(Blob(digest(data), len(data))))
    assert into.read_bytes() == data


def test_a_download_with_another_hash_or_length_is_not_taken(league: League, ann: Caller, tmp_path: Path) -> None:
    ask = league.ask(message=b"message")

    async def fetch(blob: Blob) -> None:
        async with speaker(league, ann) as client:
            await client.fetch(f"{ask.path}/message", blob, tmp_path / "message")

    with pytest.raises(DataError, match="hash"):
        asyncio.run(fetch(Blob("ab" * 32, 7)))
    assert not (tmp_path / "message").exists()
    with pytest.raises(DataError, match="requested 9 bytes of a blob and received 7"):
        asyncio.run(fetch(Blob(digest(b"message"), 9)))
    (tmp_path / "message").write_bytes(b"other")  # what was there is of something else
    with pytest.raises(DataError, match="hash"):
        asyncio.run(fetch(Blob(digest(b"message"), 7)))
    asyncio.run(fetch(Blob(digest(b"message"), 7)))
    assert (tmp_path / "message").read_bytes() == b"message"
