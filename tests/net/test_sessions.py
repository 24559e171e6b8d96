"""The secrets of a secure sum end with it: repeated asks give the same bytes, and a later thief finds nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from league import samples

import hansa
from hansa.core.ask import Ask, op_config, op_of
from hansa.core.driver import drive
from hansa.core.federation import Federation
from hansa.core.op import Op, Reply
from hansa.core.round_record import Record
from hansa.core.runtime import complete
from hansa.net.party import sessions
from hansa.net.party.samples import preparer
from hansa.net.party.sessions import PartySessions
from hansa.net.party.store import PartyStore
from hansa.net.party.worker import Worker
from hansa.net.transport.wire import Blob, Work
from hansa.plumbing import codec
from hansa.plumbing.errors import PartyError
from hansa.replies.replies import combine
from hansa.replies.reply_checks import Rules
from hansa.secure import Masking, announcement, key_agreement, ring
from hansa.secure.byte_tensors import as_bytes
from hansa.secure.mask_graph import MaskGraph
from hansa.secure.masking_ops import SecureMasked
from hansa.secure.masking_terms import own_mask, pair_mask
from hansa.secure.session import SessionSecrets

TASK = {"model": "logistic", "dtype": "float64", "shape": [3], "outputs": 2, "loss": "cross_entropy", "classes": 2,
        "party_test": 0.0, "seed": 0, "bf16": False, "prepared": False}  # fmt: skip
CHANNEL = Masking(threshold=0.7, active=False)


class Homes:
    """Deployed parties without a network; each ask is answered by a party that has just started from its folder."""

    def __init__(self, folder: Path, n: int = 3) -> None:
        self.folders = [folder / f"home-{k}" for k in range(n)]
        self.tips: list[str | None] = [None] * n
        self.asked: list[tuple[int, Work, dict[str, Any], Reply]] = []
        self.stop: str | None = None

    def answer(self, k: int, work: Work, message: dict[str, Any], folder: Path | None = None) -> Reply | str:
        store = PartyStore(folder or self.folders[k])
        try:
            worker = Worker(store, preparer((samples(k)[0], None), store.policy.limits.parameters))
            return worker.answer(work, message, {"task": TASK, "preparations": []})[0]
        finally:
            store.close()

    def one(self, ask: Ask, k: int) -> Reply | str:
        assert ask.op is not None
        message = codec.decode(codec.encode({"op": op_config(ask.op), "payload": dict(ask.payload_of(k)), "round": 0}))
        blobs = [Blob(hashlib.sha256(codec.encode(tree)).hexdigest(), 100) for tree in (message, TASK)]
        work = Work("job-1", "job", k, 0, "round", ask.index, *blobs, None, self.tips[k], None, 1)
        reply = self.answer(k, work, message)
        if isinstance(reply, str):
            return reply
        again = self.answer(k, work, message)  # the party was killed before the aggregator had its reply
        assert isinstance(again, Reply), again
        assert codec.encode(again.tree()) == codec.encode(reply.tree())
        self.tips[k] = work.ask
        self.asked.append((k, work, message, reply))
        return reply

    def sum(self, until: str | None = None) -> Any:
        """The sum of the parties' moments, or None if it stops before the exchange `until`."""
        n = len(self.folders)
        fed = Federation(range(n), 0, 0, n, protocol=CHANNEL)
        op: Op = hansa.build("op", "column-moments")

        def gathered(ask: Any) -> Any:
            if ask.op.name == until:
                raise KeyboardInterrupt
            return combine(ask, [(k, self.one(ask, k)) for k in ask.parties], Rules(), Record())

        try:
            payload = {"centre": torch.zeros(3, dtype=torch.float64)}
            return complete(drive(fed.reduce(op, payload, uniform=True), "round"), gathered)
        except KeyboardInterrupt:
            return None

    def sent(self, name: str) -> dict[int, Reply]:
        """The replies to an op, by party."""
        return {k: reply for k, _, message, reply in self.asked if message["op"]["name"] == name}


def stolen_keys(folder: Path, public: bytes) -> list[bytes]:
    """All secret keys of a public key that somebody finds who tries every 32 bytes of every file."""
    found = []
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        for at in range(max(0, len(data) - 31)):
            piece = data[at : at + 32]
            tried = (piece, SessionSecrets("", "", piece).secret("mask"))
            found += [secret for secret in tried if key_agreement.public(secret) == public]
    return found


def unmasked(homes: Homes, mask_key: bytes, seed: bytes) -> torch.Tensor:
    """The sum over the rows of party 0, from its secrets and the messages of the sum."""
    keys = {k: as_bytes(reply.tensors["keys"]) for k, reply in homes.sent("secure-keys").items()}
    told = next(sent["payload"]["asked"] for _, _, sent, _ in homes.asked if sent["op"]["name"] == "secure-shares")
    transcript = MaskGraph(CHANNEL.terms(len(keys)), keys, announcement.digest(told)).transcript
    (message,) = (sent for k, _, sent, _ in homes.asked if k == 0 and sent["op"]["name"] == "secure-masked")
    op, payload = op_of(message["op"], where="test"), message["payload"]
    assert isinstance(op, SecureMasked)
    words = ring.unpack(homes.sent("secure-masked")[0].tensors["masked"].numpy(), op.width(payload))
    ring.add_mask(words, own_mask(seed, transcript), -1)
    for other in list(keys)[1:]:
        ring.add_mask(words, pair_mask(bytes(32) + mask_key, keys[other], transcript, 0, other), -1)
    plain = {name: value for name, value in payload.items() if name != "secure"}
    return op.encoding(plain).decode(ring.signed(words, op.width(payload)), 1).sums["sum"]


@pytest.fixture
def homes(tmp_path: Path) -> Homes:
    return Homes(tmp_path)


def public_mask_key(homes: Homes) -> bytes:
    return as_bytes(homes.sent("secure-keys")[0].tensors["keys"])[32:]


def test_every_ask_of_a_sum_can_be_repeated_by_a_party_that_started_again(homes: Homes) -> None:
    found = homes.sum()
    assert found.count == 3
    x = np.concatenate([samples(k)[0][0].numpy() for k in range(3)])
    assert np.allclose(found.sums["sum"].numpy(), x.sum(0), atol=1e-6)


@pytest.mark.slow
def test_a_thief_in_the_middle_of_a_sum_can_unmask_it_and_a_thief_after_it_cannot(homes: Homes, tmp_path: Path) -> None:
    homes.sum(until="secure-unmask")
    middle = tmp_path / "middle"
    shutil.copytree(homes.folders[0], middle)
    public = public_mask_key(homes)
    (key, *_) = stolen_keys(middle, public)  # the attack is a real one
    (data,) = (path.read_bytes() for path in (middle / "sessions").iterdir())
    (root,) = (data[at : at + 32] for at in range(len(data) - 31)
               if SessionSecrets("", "", data[at : at + 32]).secret("mask") == key)  # fmt: skip
    found = unmasked(homes, key, SessionSecrets("", "", root).secret("seed"))
    assert torch.allclose(found, samples(0)[0][0].sum(0), atol=1e-6)

    homes.tips = [None] * 3
    homes.asked.clear()
    homes.sum()
    assert public_mask_key(homes) == public  # the same sum goes on
    assert stolen_keys(homes.folders[0], public) == []


def test_a_thief_with_all_messages_cannot_run_the_party_again(homes: Homes, tmp_path: Path) -> None:
    """In 0.1 the party's secret and its old messages gave the old keys again."""
    homes.sum()
    copy = tmp_path / "copy"
    shutil.copytree(homes.folders[0], copy)
    for k, work, message, before in homes.asked:
        if k != 0:
            continue
        name = message["op"]["name"]
        after = homes.answer(0, work, message, copy)
        if name == "secure-unmask":  # its answer holds no secret of this party: the aggregator has it
            assert isinstance(after, str) or codec.encode(after.tree()) == codec.encode(before.tree())
        else:
            assert isinstance(after, str) and "has ended" in after, name
    (copy / "vault.jsonl").unlink()  # a thief keeps to no rules
    shutil.rmtree(copy / "sessions")
    work, message = next((work, message) for k, work, message, _ in homes.asked if k == 0)
    after = homes.answer(0, work, message, copy)
    assert isinstance(after, Reply)
    assert not torch.equal(after.tensors["keys"], homes.sent("secure-keys")[0].tensors["keys"])


def test_the_secrets_of_a_sum_are_private_files_and_go_when_the_next_sum_begins(homes: Homes) -> None:
    homes.sum(until="secure-unmask")
    folder = homes.folders[0] / "sessions"
    (path,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    kept = PartySessions(homes.folders[0])
    new = kept.begin("job-1", "secure", "1 round 0")
    assert new not in before and [path] == list(folder.iterdir())
    assert before != path.read_bytes()
    with pytest.raises(PartyError, match="has ended"):
        kept.secret("job-1", "secure", "0 round 0")


def test_a_session_has_one_secret_until_it_ends(tmp_path: Path) -> None:
    kept = PartySessions(tmp_path)
    secret = kept.begin("job", "secure", "one")
    assert len(secret) == 32
    assert kept.begin("job", "secure", "one") == kept.secret("job", "secure", "one") == secret
    assert PartySessions(tmp_path).secret("job", "secure", "one") == secret
    others = {kept.begin("other job", "secure", "one"), kept.begin("job", "route", "one"), secret}
    assert len(others) == 3
    assert kept.answer("job", "secure", "one") is None
    kept.end("job", "secure", "one", b"answer")
    assert kept.answer("job", "secure", "one") == b"answer" and kept.answer("job", "secure", "two") is None
    for call in (kept.begin, kept.secret):
        with pytest.raises(PartyError, match="has ended"):
            call("job", "secure", "one")
    assert not any(secret in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(PartyError, match="an exchange was skipped"):
        kept.secret("job", "secure", "two")
    assert kept.begin("job", "secure", "two") != secret


def test_an_unfinished_session_is_forgotten_after_a_week(tmp_path: Path) -> None:
    kept = PartySessions(tmp_path)
    secret = kept.begin("job", "secure", "one")
    kept.forget_old(time.time() + sessions.LAST - 60)
    assert kept.secret("job", "secure", "one") == secret
    kept.forget_old(time.time() + sessions.LAST + 60)
    with pytest.raises(PartyError):
        kept.secret("job", "secure", "one")
    kept.begin("job", "secure", "one")
    (path,) = (tmp_path / "sessions").iterdir()
    os.utime(path, (1, 1))
    PartySessions(tmp_path)  # also when the party starts
    assert not path.exists()


def test_an_aggregator_cannot_fill_the_disk_with_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST", 5)
    kept = PartySessions(tmp_path)
    for k in range(12):
        kept.begin(f"job-{k}", "secure", "one")
    assert len(list((tmp_path / "sessions").iterdir())) == 5
    kept.secret("job-11", "secure", "one")  # the oldest are forgotten


def test_a_damaged_session_is_a_lost_one(tmp_path: Path) -> None:
    kept = PartySessions(tmp_path)
    secret = kept.begin("job", "secure", "one")
    (path,) = (tmp_path / "sessions").iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(PartyError, match="an exchange was skipped"):
        kept.secret("job", "secure", "one")
    assert kept.begin("job", "secure", "one") != secret
