"""Jobs through relays: any tree gives the bits of the flat federation, and keeps what parties are promised."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from league import PATIENCE, League, draft, logistic_task, samples
from relay_league import RelayLeague

import hansa
from hansa.core.plain_data import from_config
from hansa.net.aggregator import intake, runtime
from hansa.net.aggregator.federation import init
from hansa.net.aggregator.order import check_order
from hansa.net.aggregator.relayed import RelayedReplies
from hansa.net.audit.verify import verify
from hansa.net.relay import relay
from hansa.net.relay.process import check_root
from hansa.net.transport import certificates, client, keys
from hansa.net.transport.signing import About
from hansa.net.transport.wire import Enrolment, IssuedCertificate, Order, RelayPoll, pack, unpack
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick")
NAMES = ("ann", "bob", "cid", "dan", "eve+", "fay")
TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64"}
EXACT = {"sums": "exact", "max_weight": 1000}


class Tree:
    """A root, its relays (by name; a relay may have relays of its own), and all parties."""

    def __init__(self, folder: Path, shape: Mapping[str, Any], direct: Sequence[str] = ()) -> None:
        leaves = {name: leaves_of(inner) for name, inner in shape.items()}
        every = sorted([*direct, *(leaf for group in leaves.values() for leaf in group)])
        self.root = League(folder / "root", every, relays=leaves)
        self.relays: dict[str, RelayLeague] = {}
        for name, inner in shape.items():
            self._grow(folder, name, inner, self.root)
        for name in direct:
            self.root.join(name, samples(NAMES.index(name)))

    def _grow(self, folder: Path, name: str, inner: Any, above: League) -> None:
        nested = {part[0]: part[1] for part in inner if isinstance(part, tuple)}
        groups = {sub: leaves_of(parts) for sub, parts in nested.items()}
        league = self.relays[name] = RelayLeague(folder / name, name, leaves_of(inner), above, groups)
        for sub, parts in nested.items():
            self._grow(folder, sub, parts, league)
        for leaf in inner:
            if isinstance(leaf, str):
                league.join(leaf, samples(NAMES.index(leaf)))

    def run(self, algorithm: Any = "fedavg", **run: Any) -> dict[str, Any]:
        tree = {"task": TASK, "algorithm": algorithm, "run": {"rounds": 2, **run}}
        return self.root.ended_after_all(self.root.submit(tree))

    def close(self) -> None:
        for league in (*self.relays.values(), self.root):
            for member in league.members.values():
                member.leave()
        for league in (*self.relays.values(), self.root):
            league.stop()


def leaves_of(inner: Any) -> list[str]:
    return [leaf for part in inner for leaf in (leaves_of(part[1]) if isinstance(part, tuple) else [part])]


def simulated(parties: Sequence[str], algorithm: Any = "fedavg", **run: Any) -> Any:
    data = [samples(NAMES.index(name))[0] for name in parties]
    run.pop("max_weight", None)
    made = from_config("algorithm", algorithm, where="algorithm")
    return hansa.simulate(made, logistic_task(data, parties), engine="reference", **{"rounds": 2, **run}).saved_model()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    """A root with one party of its own, a relay with two, and a relay with one and with a relay of two."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((runtime, "TICK"), (relay, "TICK"), (relay, "LOOK"), (client, "LEAST")):
            patch.setattr(module, name, 0.02)
        patch.setattr(client, "MOST", 0.1)
        tree = Tree(tmp_path_factory.mktemp("tree"),
                    {"north": ["ann", "dan"], "south": ["bob", ("west", ["eve+", "fay"])]}, ["cid"])  # fmt: skip
        yield tree
        tree.close()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[RelayedReplies]]:
    """What relays answer, by the phase of the ask."""
    answers: dict[str, list[RelayedReplies]] = {}
    checked = intake.judged

    def judged(content: RelayedReplies, relay: str, terms: Any, leaves: Any) -> Any:
        if relay in ("north", "south"):
            answers.setdefault(terms.ask.phase, []).append(content)
        return checked(content, relay, terms, leaves)

    monkeypatch.setattr(intake, "judged", judged)
    return answers


def model(league: League, job: str) -> Any:
    (row,) = league.ledger.all("SELECT model FROM jobs WHERE id = ?", job)
    return league.aggregator.blobs.read(row["model"])


@pytest.mark.thin(1)
@pytest.mark.parametrize(
    ("algorithm", "run"),
    [("fedavg", EXACT), ("fedavg", {}), ("scaffold", EXACT), ({"name": "fedavg", "fusion": "median"}, {})],
    ids=["sums", "ordered", "memory", "median"],
)
def test_a_tree_gives_the_bits_of_the_flat_federation(
    tree: Tree, algorithm: Any, run: dict[str, Any], seen: dict[str, list[RelayedReplies]]
) -> None:
    seen.clear()
    ended = tree.run(algorithm, **run)
    assert ended["status"] == "finished", ended["reason"]
    saved = model(tree.root, ended["id"])
    assert codec.encode(codec.decode(saved)) == codec.encode(simulated(NAMES, algorithm, **run))
    summed = {phase: [answer.sum is not None for answer in answers] for phase, answers in seen.items()}
    assert summed["round"] == [run is EXACT] * 4, "two relays, two rounds: sums if they are exact, else single replies"
    assert summed["describe"] == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "privacy"),
    [
        ({"sums": "exact"}, {"dp": {"name": "central", "clip": 0.5, "sigma": 0.0}}),
        ({}, {"secure": {"name": "masking", "active": False}}),
    ],
    ids=["dp", "masks"],
)
def test_privacy_works_through_relays(tree: Tree, run: dict[str, Any], privacy: dict[str, Any]) -> None:
    experiment = {"task": TASK, "algorithm": "fedavg", "run": {"rounds": 2, **run}, "privacy": privacy}
    ended = tree.root.ended_after_all(tree.root.submit(experiment))
    assert ended["status"] == "finished", ended["reason"]
    lines = [
        json.loads(row["line"]) for row in tree.root.ledger.all("SELECT line FROM rounds WHERE job = ?", ended["id"])
    ]
    assert [(line["asked"], line["replies"]) for line in lines] == [(6, 6), (6, 6)]
    if "dp" in privacy:
        saved = codec.encode(codec.decode(model(tree.root, ended["id"])))
        assert saved == codec.encode(simulated(NAMES, privacy=privacy, **run))


@pytest.mark.slow
def test_an_asynchronous_job_takes_tickets_through_relays(tree: Tree) -> None:
    ended = tree.run({"name": "fedbuff", "buffer": 2}, cohort_size=3)
    assert ended["status"] == "finished", ended["reason"]


def test_the_logs_of_root_and_relays_verify_and_name_the_parties(tree: Tree, tmp_path: Path) -> None:
    ended = tree.run(**EXACT)
    for league, homes in ((tree.root, ["homes/cid"]), (tree.relays["north"], ["homes/ann", "homes/dan"])):
        path = tmp_path / f"{league.folder.name}.jsonl"
        league.operator.export(path)
        report = verify(path, None, [league.folder / home for home in homes])
        assert report.receipts > 0
    receipts = [tree.relays[name].folder / "relay" for name in ("north", "south")]
    tree.root.until(lambda: all([*folder.glob("receipts/*.jsonl")] for folder in receipts))  # the last ones may be late
    assert verify(tmp_path / "root.jsonl", None, receipts).receipts > 0
    (closed, _) = [e for e in tree.root.events("round closed") if e["job"] == ended["id"]]
    members = {m["party"]: m.get("parties") for m in json.loads(closed["detail"])["members"]}
    assert members == {"cid": None, "north": ["ann", "dan"], "south": ["bob", "eve+", "fay"]}

    def passed() -> list[Any]:
        return [e for e in tree.relays["north"].events("passed on") if e["job"] == ended["id"]]

    end = time.monotonic() + PATIENCE
    while len(passed()) < 2 and time.monotonic() < end:  # one per round; the last one may be late too
        time.sleep(0.05)
    assert len(passed()) >= 2
    assert all(json.loads(e["detail"])["receipt"]["status"] == "accepted" for e in passed())


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path, {"north": ["ann", "bob", "cid"]})
    yield tree
    tree.close()


@pytest.mark.slow
def test_the_root_learns_why_a_party_behind_a_relay_refuses(small: Tree) -> None:
    north = small.relays["north"]
    north.members.pop("bob").leave()
    north.join("bob", samples(1), "min_cohort = 50\n")
    ended = small.run("fedavg", **EXACT)
    assert ended["status"] == "finished", ended["reason"]
    (entry,) = small.root.events("not taking part")
    assert entry["party"] == "bob" and "50" in json.loads(entry["detail"])["why"]
    assert [json.loads(row["members"]) for row in small.root.ledger.all("SELECT members FROM rounds")] == [
        ["ann", "cid"],
        ["ann", "cid"],
    ]


@pytest.mark.slow
def test_a_job_waits_for_the_parties_behind_a_relay_and_goes_on_without_one(small: Tree) -> None:
    north = small.relays["north"]
    north.members.pop("cid").leave()
    north.queue.absent_after = 3.0  # on a busy machine the other parties may be silent for a second
    small.root.until(lambda: small.root.queue.present(range(3)) == [0, 1])
    tree = {"task": TASK, "algorithm": "fedavg", "run": {"rounds": 2, "quorum": 2, **EXACT}}
    job = small.root.submit(tree, min_parties=2)
    ended = small.root.ended_after_all(job)
    assert ended["status"] == "finished", ended["reason"]
    assert [json.loads(row["members"]) for row in small.root.ledger.all("SELECT members FROM rounds")] == [
        ["ann", "bob"],
        ["ann", "bob"],
    ]


@pytest.mark.slow
def test_a_party_that_a_relay_does_not_know_does_not_hold_up_the_relay_below(tmp_path: Path) -> None:
    """The root lists a party behind a relay whose own operator left it out."""
    root = League(tmp_path / "root", ["ann", "bob", "cid"], relays={"north": ["ann", "bob", "cid"]})
    north = RelayLeague(tmp_path / "north", "north", ["ann", "bob"], root, {"west": ["ann"]})
    west = RelayLeague(tmp_path / "west", "west", ["ann"], north)
    try:
        west.join("ann", samples(0))
        north.join("bob", samples(1))
        job = root.submit({"task": TASK, "algorithm": "fedavg", "run": {"rounds": 2, "quorum": 2, **EXACT}},
                          min_parties=2)  # fmt: skip
        ended = root.ended_after_all(job)
        assert ended["status"] == "finished", ended["reason"]
        members = [json.loads(row["members"]) for row in root.ledger.all("SELECT members FROM rounds")]
        assert members == [["ann", "bob"], ["ann", "bob"]]
    finally:
        for league in (west, north):
            for member in league.members.values():
                member.leave()
        for league in (west, north, root):
            league.stop()


def test_who_connects_to_the_wrong_place_is_told_where_to_go(small: Tree) -> None:
    root, north = small.root, small.relays["north"]
    home = north.store.folder
    hub = root.caller(keys.read_key(home / "key.pem"), (home / "cert.pem", home / "key.pem"), "north")
    assert "run it with `hansa relay`" in hub.call("GET", "/v1/work?instance=1").error
    token, change = root.aggregator.registry.invite("ann")
    root.ledger.now(change)
    key = keys.new_key()
    got = root.nobody().call("POST", "/v1/enrol", pack(Enrolment(token.secret, certificates.make_request(key, "ann"))))
    ann = root.certified("ann", key, unpack(got.body, IssuedCertificate).certificate)
    assert "ann is behind the relay north here" in ann.call("GET", "/v1/work?instance=1").error
    assert "ann is no relay here" in ann.call("POST", "/v1/relay", pack(RelayPoll("1", 0.0))).error
    asked = root.ask()
    for got in (ann.reply(asked, draft(why="no")), ann.call("GET", f"{asked.path}/message")):
        assert got.status == 403 and "ann is behind the relay north here" in got.error
    assert not root.replies(asked), "its answer would keep those of the other parties behind the relay out"
    root.close_ask(asked)
    caller = north.chief()
    order = pack(Order("job", {"task": TASK, "algorithm": "fedavg"}, None, None))
    assert "submit the job there" in caller.call("POST", "/v1/jobs", order, About()).error


@pytest.mark.parametrize(
    ("parties", "relays", "fault"),
    [
        (["ann"], {"north": ["north"]}, "a relay cannot be behind itself"),
        (["ann", "bob"], {"north": ["ann"], "south": ["ann"]}, "'ann' is behind two relays, north and south"),
        (["ann"], {"ann": ["ann"]}, "'ann' is also a party"),
        (["ann"], {"north": ["amn"]}, "there is no party 'amn'.*ann"),
        (["ann"], {"north": []}, "no party is behind this relay"),
        (["ann"], {"north": ["ann", "ann"]}, "a party is listed twice"),
    ],
)
def test_relays_that_cannot_be_are_refused_in_one_sentence(
    tmp_path: Path, parties: list[str], relays: dict[str, list[str]], fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        init(tmp_path / "league", "league", parties, ["127.0.0.1"], 0, relays=relays)


def test_a_relay_s_root_is_not_the_relay_itself(tmp_path: Path) -> None:
    made = init(tmp_path / "league", "league", ["ann"], ["127.0.0.1"], 8443)
    token = made.token("ann")
    for url, given in (("https://127.0.0.1:8443", None), (None, token), ("https://elsewhere:8443", token)):
        with pytest.raises(ConfigError, match="the root of this relay is the relay itself"):
            check_root(made, url, given)


@pytest.mark.parametrize(
    ("tables", "fault"),
    [
        ({"algorithm": "d-psgd"}, "send each other sealed messages"),
        ({"privacy": {"secure": "masking"}}, "set active = false"),
        ({"audit": {"keep_replies": True}}, "audit.keep_replies"),
    ],
)
def test_a_job_that_relays_cannot_pass_on_is_refused(tables: dict[str, Any], fault: str) -> None:
    order = Order("job", {"task": TASK, "algorithm": "fedavg", "run": {"rounds": 2}, **tables})
    check_order(order, (), ["ann", "bob", "cid"])
    with pytest.raises(ConfigError, match=fault):
        check_order(order, (), ["ann", "bob", "cid"], relays=True)
