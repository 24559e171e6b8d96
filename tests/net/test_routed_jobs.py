"""D-PSGD between organisations: messages from party to party, relayed by an aggregator that cannot read them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from league import PARTIES, PATIENCE, League, logistic_task, memory, samples

import hansa
from hansa.core.op import Memory
from hansa.net.aggregator.asks import WHERE
from hansa.net.aggregator.blobs import Blobs
from hansa.net.transport import certificates
from hansa.net.transport.wire import Work
from hansa.testing import same_bits

pytestmark = pytest.mark.usefixtures("quick")
TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64"}
LOCAL = {"name": "sgd", "lr": 0.2, "steps": 2, "batch": 5}
ROUNDS = 3


def tree(**run: Any) -> dict[str, Any]:
    algorithm = {"name": "d-psgd", "topology": "complete", "local": LOCAL}
    return {"task": TASK, "algorithm": algorithm, "run": {"rounds": ROUNDS, "deadline": 60.0, **run}}


def simulated(absent: Callable[[int, int], bool] | None = None, rounds: int = ROUNDS) -> hansa.Result:
    algorithm = hansa.DecentralizedSGD(local=hansa.SGD(lr=0.2, steps=2, batch=5), topology="complete")
    return hansa.simulate(algorithm, logistic_task(), engine="reference", rounds=rounds, absent=absent)


def ended(league: League, **run: Any) -> dict[str, Any]:
    done = league.ended(league.submit(tree(**run), min_parties=3))
    assert done["status"] == "finished", done["reason"]
    return done


def before(league: League, name: str, op: str, round: int, act: Callable[[Work], Any]) -> None:
    """Let a party act before it answers an op of a round."""
    worker = league.members[name].worker
    answer = worker.answer

    def late(work: Any, message: dict[str, Any], task: dict[str, Any]) -> Any:
        if message["op"]["name"] == op and work.round == round:
            act(work)
        return answer(work, message, task)

    worker.answer = late  # type: ignore[method-assign]


def too_late(league: League, name: str, silent: set[int]) -> Callable[[Work], None]:
    """Wait until the ask is closed."""

    def wait(work: Work) -> None:
        key = (work.job, work.round, work.phase, work.number)
        end = time.monotonic() + PATIENCE
        silent.add(league.number(name))
        while league.ledger.one(f"SELECT 1 FROM asks WHERE {WHERE} AND closed IS NULL", *key) is not None:
            assert time.monotonic() < end
            time.sleep(0.02)
        silent.clear()

    return wait


def test_a_deployed_job_has_the_bits_and_the_bytes_of_its_simulation(found: Callable[..., League]) -> None:
    league, reference = found().join_all(), simulated()
    done = ended(league)
    assert same_bits(league.model(done["id"]), reference.saved_model())
    for line, expected in zip(done["rounds"], reference.history, strict=True):
        for name in ("asked", "replies", "train_loss"):
            assert line[name] == expected[name]
        assert (line["bytes_up"], line["bytes_down"]) == (expected["bytes_up"], expected["bytes_down"])
    for k, name in enumerate(PARTIES):
        assert torch.equal(memory(league, name, done["id"])["gossip/w"], reference.memories[k]["gossip/w"])


@pytest.mark.slow
def test_the_aggregator_never_gets_the_models_that_parties_send(
    found: Callable[..., League], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of earlier rounds are only sent to neighbours; those after the last round are read for the average."""
    league, uploads = found().join_all(), list[bytes]()
    append = Blobs.append

    def recorded(self: Blobs, owner: str, digest: str, at: int, data: bytes, limit: int) -> int:
        uploads.append(bytes(data))
        return append(self, owner, digest, at, data, limit)

    monkeypatch.setattr(Blobs, "append", recorded)
    ended(league, eval_every=ROUNDS)
    received = b"".join(uploads)

    def seen(rounds: int) -> list[bool]:
        models = [simulated(rounds=rounds).memories[k]["gossip/w"].numpy().tobytes() for k in range(3)]
        return [model in received for model in models]

    assert seen(1) == seen(2) == [False] * 3
    assert seen(3) == [True] * 3  # the search finds what was sent in the clear


@pytest.mark.slow
@pytest.mark.parametrize("op", ["route-keys", "route-send"])
def test_a_party_that_leaves_before_its_message_keeps_its_model(
    op: str, found: Callable[..., League], silent: set[int]
) -> None:
    """It leaves before its key, or between its key and its message. Its neighbours keep the weight of its model."""
    league = found().join_all()
    before(league, "cid", op, 1, too_late(league, "cid", silent))
    done = ended(league, deadline=1.0, quorum=0.6)
    reference = simulated(absent=lambda party, round: (party, round) == (2, 1))
    assert same_bits(league.model(done["id"]), reference.saved_model())
    assert done["rounds"][1]["missing"] == {"cid": "it did not answer within the deadline of 1 s"}
    assert [line["replies"] for line in done["rounds"]] == [3, 2, 3]
    assert [line["asked"] for line in done["rounds"]] == [3, 3, 3]


@pytest.mark.slow
def test_a_party_that_leaves_after_its_message_keeps_its_model_and_the_others_use_it(
    found: Callable[..., League], silent: set[int]
) -> None:
    league = found().join_all()
    models = list[Memory]()

    def leave(work: Work) -> None:
        too_late(league, "cid", silent)(work)
        models.append(memory(league, "cid", work.job))

    before(league, "cid", "route-receive", ROUNDS - 1, leave)
    done = ended(league, deadline=1.0, quorum=0.6)
    assert done["rounds"][-1]["missing"] == {"cid": "it did not answer within the deadline of 1 s"}
    reference, earlier = simulated(), simulated(rounds=ROUNDS - 1)
    for k, name in enumerate(PARTIES[:2]):
        assert torch.equal(memory(league, name, done["id"])["gossip/w"], reference.memories[k]["gossip/w"])
    (staged,) = models
    assert torch.equal(staged["gossip/w"], earlier.memories[2]["gossip/w"])
    assert "gossip/delta" in staged  # its training of the round, which the next round would replace


@pytest.mark.thin(1)
@pytest.mark.parametrize("op", ["route-keys", "route-send", "route-receive"])
def test_an_aggregator_that_restarts_in_the_middle_of_a_route_gives_the_same_bits(
    op: str, found: Callable[..., League]
) -> None:
    league, reached, go_on = found().join_all(), threading.Event(), threading.Event()

    def wait(work: Work) -> None:
        reached.set()
        assert go_on.wait(PATIENCE)

    before(league, "bob", op, 1, wait)
    job = league.submit(tree(), min_parties=3)
    assert reached.wait(PATIENCE)
    league.stop()
    go_on.set()
    league.start()
    done = league.ended_after_all(job)
    assert done["status"] == "finished", done["reason"]
    assert same_bits(league.model(job), simulated().saved_model())


@pytest.mark.slow
def test_a_party_that_forgets_its_keys_declines_and_the_others_go_on(found: Callable[..., League]) -> None:
    """Its memory is lost between its key and its message."""
    league = found().join_all()
    home = league.folder / "homes" / "cid" / "memory"

    def forget(work: Work) -> None:
        for path in home.rglob("*.safetensors"):
            path.unlink()

    before(league, "cid", "route-send", 1, forget)
    done = ended(league, quorum=0.6)
    assert "knows nothing of this route" in done["rounds"][1]["missing"]["cid"]
    assert [line["replies"] for line in done["rounds"]] == [3, 2, 3]


@pytest.mark.slow
def test_a_party_accepts_messages_of_its_pinned_peers_alone(found: Callable[..., League]) -> None:
    """Ann names bob, not cid. She neither seals for cid nor opens what it sends."""
    league = found().join_all()
    fingerprint = certificates.fingerprint((league.folder / "homes" / "bob" / "cert.pem").read_bytes())
    league.members["ann"].leave()
    league.join("ann", samples(0), f'[peers]\nbob = "{fingerprint}"')
    done = ended(league)
    for line in done["rounds"]:
        assert line["rejected"].keys() == {"cid"}
        assert "ann refused its message: its key is not signed" in line["rejected"]["cid"]
        assert line["replies"] == 3
    reference = simulated()
    assert not torch.equal(memory(league, "ann", done["id"])["gossip/w"], reference.memories[0]["gossip/w"])


@pytest.mark.parametrize("floor", ["secure = true", "active = true"])
def test_a_party_that_requires_secure_sums_sends_no_messages(floor: str, found: Callable[..., League]) -> None:
    league = found().join_all(bob=f"[privacy]\n{floor}")
    done = league.ended(league.submit(tree(rounds=1, quorum=0.6), min_parties=3))
    (line,) = done["rounds"]
    assert "sends messages to other parties" in line["missing"]["bob"]
