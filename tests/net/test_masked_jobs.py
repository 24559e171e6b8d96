"""Masked sums over the network: the same sum, secrets only at the parties, and parties authenticated by
certificates."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from league import PARTIES, PATIENCE, League, logistic_task, samples, tensors

import hansa
from hansa.core.plain_data import build
from hansa.net.party.floor import Floor
from hansa.net.party.peers import Peers
from hansa.net.party.policy import Policy
from hansa.net.party.vault_lines import read_vault
from hansa.net.transport import certificates, keys
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.secure import signatures

pytestmark = pytest.mark.usefixtures("quick")
TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64"}
SUMS = 4  # two of the preparation, and one per round


def tree(algorithm: str = "scaffold", **privacy: Any) -> dict[str, Any]:
    return {"task": {**TASK, "prepare": "standardise"}, "algorithm": algorithm, "run": {"rounds": 2, "deadline": 60.0},
            "privacy": {"secure": "masking", **privacy}}  # fmt: skip


def simulated(algorithm: str = "scaffold") -> Any:
    task = logistic_task(prepare=hansa.Standardise())
    return hansa.simulate(build("algorithm", algorithm), task, engine="reference", rounds=2).saved_model()


def answered(league: League, name: str) -> list[str]:
    """The answers of a party in secure sums."""
    said = [said.split()[0] for _, said in read_vault(league.folder / "homes" / name).answered]
    return [name for name in said if name.startswith("secure-")]


@pytest.mark.thin(1)
@pytest.mark.parametrize("active", [False, True])
def test_a_masked_job_gives_the_plain_model_and_each_answer_once(active: bool, found: Callable[..., League]) -> None:
    league = found()
    algorithm = "fedavg" if active else "scaffold"  # active parties refuse sums of what they remember
    for k, name in enumerate(PARTIES):
        league.join(name, samples(k), "[privacy]\nactive = true" if active else "")
    ended = league.ended(league.submit(tree(algorithm, active=active, threshold=0.7), min_parties=3))
    assert ended["status"] == "finished", ended["reason"]
    assert [line["replies"] for line in ended["rounds"]] == [3, 3]
    for one, other in zip(tensors(league.model(ended["id"])), tensors(simulated(algorithm)), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    once = ["secure-shares", "secure-masked", *(["secure-consistent"] if active else []), "secure-unmask"]
    for name in PARTIES:
        kept = answered(league, name)
        assert kept == once * SUMS


def test_packed_models_are_what_was_announced(found: Callable[..., League]) -> None:
    """And a party's own learning rate is not announced: it is nobody else's business."""
    run = {"rounds": 2, "compress_down": "int8"}
    masked = {"secure": "masking", "active": True}
    league = found()
    for k, name in enumerate(PARTIES):
        league.join(name, samples(k), "[privacy]\nactive = true\n" + ("[own]\nlr = 0.3" if name == "cid" else ""))
    given = {"task": TASK, "algorithm": "fedavg", "run": {**run, "deadline": 60.0}, "privacy": masked}
    ended = league.ended(league.submit(given, min_parties=3))
    assert ended["status"] == "finished", ended["reason"]
    assert [line["replies"] for line in ended["rounds"]] == [3, 3]
    own = {"cid": {"lr": 0.3}}
    plain = hansa.simulate(hansa.FedAvg(), logistic_task(), engine="reference", **run, own=own,
                           privacy={**masked, "active": False})  # fmt: skip
    for one, other in zip(tensors(league.model(ended["id"])), tensors(plain.saved_model()), strict=True):
        assert torch.equal(one, other)


def test_a_job_that_wants_to_be_believed_gets_nothing_from_parties_that_do_not(found: Callable[..., League]) -> None:
    league = found()
    for k, name in enumerate(PARTIES):
        league.join(name, samples(k), "[privacy]\nactive = true" if name == "ann" else "")
    ended = league.ended(league.submit({**tree(active=False), "task": TASK, "run": {"rounds": 1}}, min_parties=3))
    assert ended["status"] == "failed"
    assert "ann: its policy requires masked sums with signatures" in ended["reason"]


def test_a_slow_party_holds_no_exchange_up_beyond_the_deadline(found: Callable[..., League], silent: set[int]) -> None:
    """The party has shared its secrets, so its masks are removed from the sum of the others."""
    league, go_on = found(), threading.Event()
    league.join_all()
    worker = league.members["cid"].worker
    answer = worker.answer

    def slowly(work: Any, message: dict[str, Any], task: dict[str, Any]) -> Any:
        if message["op"]["name"] == "secure-masked":
            silent.add(league.number("cid"))
            assert go_on.wait(PATIENCE)
        return answer(work, message, task)

    worker.answer = slowly  # type: ignore[method-assign]
    run = {"rounds": 1, "deadline": 1.0, "quorum": 0.6}
    job = league.submit(
        {**tree(threshold=0.6, active=False), "task": TASK, "algorithm": "fedavg", "run": run}, min_parties=3
    )
    ended = league.ended(job)
    go_on.set()
    assert ended["status"] == "finished", ended["reason"]
    (line,) = ended["rounds"]
    assert line["replies"] == 2
    assert line["missing"] == {"cid": "it did not answer within the deadline of 1 s"}
    plain = hansa.simulate(hansa.FedAvg(), logistic_task(names=PARTIES[:2]), engine="reference", rounds=1).saved_model()
    for one, other in zip(tensors(league.model(ended["id"])), tensors(plain), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.slow
def test_a_masked_sum_goes_on_after_the_aggregator_was_restarted(found: Callable[..., League]) -> None:
    """It announces the same as before, and its task is the one for which the parties signed their keys."""
    league = found()
    for k, name in enumerate(PARTIES):
        league.join(name, samples(k), "[privacy]\nactive = true")
    reached, go_on = threading.Event(), threading.Event()
    worker = league.members["cid"].worker
    answer = worker.answer

    def slowly(work: Any, message: dict[str, Any], task: dict[str, Any]) -> Any:
        if message["op"]["name"] == "secure-masked" and not reached.is_set():
            reached.set()
            assert go_on.wait(PATIENCE)
        return answer(work, message, task)

    worker.answer = slowly  # type: ignore[method-assign]
    job = league.submit({**tree(), "algorithm": "fedavg"}, min_parties=3)
    assert reached.wait(PATIENCE)
    league.stop()
    league.start()
    go_on.set()
    ended = league.ended(job)
    assert ended["status"] == "finished", ended["reason"]
    assert [line["replies"] for line in ended["rounds"]] == [3, 3]


class Certified:
    """A party's folder, with a certificate of an authority."""

    def __init__(self, folder: Path, authority: tuple[Any, bytes], name: str, federation: str = "league",
                 role: str = "party") -> None:  # fmt: skip
        folder.mkdir()
        key = keys.new_key()
        self.certificate = certificates.issue(*authority, key.public_key(), name, role, federation, 9)
        keys.write_private(folder / "key.pem", keys.key_bytes(key))
        keys.write_private(folder / "cert.pem", self.certificate)
        keys.write_private(folder / "ca.pem", authority[1])
        keys.write_private(folder / "party.json", json.dumps({"federation": federation}).encode())
        self.folder, self.fingerprint = folder, certificates.fingerprint(self.certificate)

    def knows(self, other: Certified, **pins: str) -> str:
        return Peers(self.folder, pins).known(other.certificate)[0]


def test_parties_know_each_other_by_certificates_of_their_authority(tmp_path: Path) -> None:
    authority, other = certificates.make_ca("league"), certificates.make_ca("league")
    ann, bob = (Certified(tmp_path / name, authority, name) for name in ("ann", "bob"))
    assert ann.knows(bob) == "bob"
    certificate, signature = Peers(bob.folder, {}).sign(b"data")
    key = Peers(ann.folder, {}).known(certificate)[1]
    assert signatures.verify(key, b"data", signature)
    assert not signatures.verify(key, b"date", signature)
    assert len(certificate) < signatures.CERTIFICATE - 2
    for false in (Certified(tmp_path / "x", other, "bob"), Certified(tmp_path / "y", authority, "bob", "elsewhere"),
                  Certified(tmp_path / "z", authority, "bob", role="operator")):  # fmt: skip
        with pytest.raises(PartyError, match="cannot trust another party"):
            ann.knows(false)
    with pytest.raises(PartyError, match="cannot trust"):
        Peers(ann.folder, {}).known(b"nothing")


def test_a_party_that_pins_the_others_takes_nobody_else_for_a_party(tmp_path: Path) -> None:
    """What a holder of the authority's key could do."""
    authority = certificates.make_ca("league")
    ann, bob, eve = (Certified(tmp_path / name, authority, name) for name in ("ann", "bob", "eve"))
    pins = {"bob": bob.fingerprint}
    assert ann.knows(bob, **pins) == "bob"
    assert ann.knows(ann, **pins) == "ann"
    with pytest.raises(PartyError, match="has no pin for eve"):
        ann.knows(eve, **pins)
    for known in ({}, pins):
        with pytest.raises(PartyError, match="lists this party with another certificate"):
            ann.knows(Certified(tmp_path / f"other-{len(known)}", authority, "ann"), **known)
    again = Certified(tmp_path / "again", authority, "bob")
    with pytest.raises(PartyError, match="has no pin for bob"):
        ann.knows(again, **pins)
    with pytest.raises(ConfigError, match=r"peers.bob: expected the fingerprint"):
        Policy(peers={"bob": "abc"}, privacy=Floor(active=True))
