"""The live page over HTTP, without a browser: its headers, limits and events, and the actions of the token."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from league import PARTIES, PATIENCE, League, samples, until

from hansa.cli import network  # noqa: F401 (adds the commands of a federation)
from hansa.cli.app import app
from hansa.experiment.config import parse
from hansa.net.aggregator import runtime
from hansa.net.aggregator.federation import ADMIN_TOKEN, new_admin_token
from hansa.net.aggregator.live import Live, Verifier
from hansa.net.party import agent, approval_gate
from hansa.net.party.approvals import Approvals
from hansa.plumbing.errors import HansaError
from hansa.ui.events import SUBSCRIBERS
from hansa.ui.page import BODY, FILES, HEADERS, WRONG

ADMIN = {"admin": "127.0.0.1:0"}
EXPERIMENT = """
[task]
parties = ["a.csv"]
model = "logistic"
[run]
rounds = {rounds}
"""


@pytest.fixture
def league(tmp_path: Path) -> Iterator[League]:
    league = League(tmp_path / "league", **ADMIN)
    yield league
    league.close()


def ask(league: League, path: str, method: str = "GET", body: Any = None, headers: Mapping[str, str] | None = None
        ) -> tuple[int, Mapping[str, str], Any]:  # fmt: skip
    """Status, headers and body; JSON is read."""
    line = http.client.HTTPConnection("127.0.0.1", league.aggregator.admin.port, timeout=PATIENCE)
    try:
        line.request(method, path, None if body is None else json.dumps(body), dict(headers or {}))
        got = line.getresponse()
        data = got.read()
        return got.status, dict(got.headers), json.loads(data) if "json" in got.headers["Content-Type"] else data
    finally:
        line.close()


def token(league: League) -> str:
    return (league.folder / ADMIN_TOKEN).read_text().strip()


def post(league: League, path: str, body: Any, shown: str | None = None, **headers: str) -> tuple[int, Any]:
    given = {"Authorization": f"Bearer {token(league) if shown is None else shown}", **headers}
    status, _, data = ask(league, path, "POST", body, given)
    return status, data


class Events:
    """A subscriber to the page's events."""

    def __init__(self, league: League, last: str = "") -> None:
        self.line = http.client.HTTPConnection("127.0.0.1", league.aggregator.admin.port, timeout=PATIENCE)
        self.line.request("GET", "/events", headers={"Last-Event-ID": last} if last else {})
        self.got = self.line.getresponse()
        self.last = last

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next event other than a heartbeat; "over" at the end of the stream."""
        while True:
            fields = {}
            while (text := self.got.readline().decode()) not in ("\n", ""):
                name, _, value = text.strip().partition(": ")
                fields[name] = value
            if text == "":
                return "over", {}
            self.last = fields.get("id", self.last)
            if fields.get("event") not in (None, "beat"):
                return fields["event"], json.loads(fields["data"])

    def close(self) -> None:
        self.got.close()
        self.line.close()


def tree(rounds: int = 3, **run: Any) -> dict[str, Any]:
    return {"task": {"parties": ["x"], "model": "logistic"}, "run": {"rounds": rounds, **run}}


# The page


def test_the_page_and_its_files_may_load_nothing_from_elsewhere_and_are_small(league: League) -> None:
    size = 0
    for path in FILES:
        status, headers, body = ask(league, path)
        size += len(body)
        assert status == 200 and body
        assert {name: headers[name] for name in HEADERS} == HEADERS
        assert "Access-Control-Allow-Origin" not in headers
        text = body.decode()
        assert not [bad for bad in ("https://", "//cdn", "innerHTML", "eval(", "document.write") if bad in text]
    assert size < 40_000
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "frame-ancestors 'none'" in policy


def test_other_methods_are_refused_and_no_other_site_is_let_in(league: League) -> None:
    for path in (*FILES, "/events", "/report"):
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert ask(league, path, method)[0] == 405 if method != "HEAD" else True
    for path in ("/start", "/stop", "/token"):
        for method in ("GET", "PUT", "OPTIONS"):
            status, headers, _ = ask(league, path, method, headers={"Origin": "http://evil.example"})
            assert status == 405 and "Access-Control-Allow-Origin" not in headers
    assert ask(league, "/report")[0] == 404


@pytest.mark.parametrize("path", ["/", "/events", "/live.js"])
def test_a_name_that_was_pointed_here_is_refused(league: League, path: str) -> None:
    for host in (
        "evil.example",
        "evil.example:9464",
        "localhost.evil.example",
        "192.0.2.1",
        "127.0.0.1.evil.example",
        "",
    ):
        assert ask(league, path, headers={"Host": host})[0] == 421, host
    if path != "/events":
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:9464", "[::1]:9464", "127.9.9.9"):
            assert ask(league, path, headers={"Host": host})[0] == 200, host
    assert (
        ask(league, "/stop", "POST", {}, {"Host": "evil.example", "Authorization": f"Bearer {token(league)}"})[0] == 421
    )


def test_names_and_addresses_that_are_meant_are_taken(tmp_path: Path) -> None:
    league = League(tmp_path / "league", **ADMIN, admin_open=True, admin_hosts=("aggregator.internal",))
    for host, status in (("aggregator.internal", 200), ("192.0.2.1:9464", 200), ("evil.example", 421)):
        assert ask(league, "/", headers={"Host": host})[0] == status, host
    league.close()


# Events


@pytest.mark.slow
def test_events_tell_of_a_job_from_its_submission_to_its_end(league: League) -> None:
    league.join_all()
    events = Events(league)
    assert events.got.headers["Content-Type"].startswith("text/event-stream")
    kind, data = events.next()
    assert kind == "snapshot" and data["values"]["jobs"] == [] and data["values"]["about"]["title"] == "league"
    assert {name for name in data["values"] if name.startswith("party:")} == {f"party:{name}" for name in PARTIES}
    job = league.submit(tree(5))
    values, rounds = data["values"], []
    while (
        not values["jobs"]
        or values["jobs"][0]["status"] != "finished"
        or values["log"]["verified"] < values["log"]["size"]
    ):
        _, data = events.next()
        values |= data["values"]
        rounds += data["rounds"].get(job, [])
    assert [line["round"] for line in rounds] == [1, 2, 3, 4, 5] and all("train_loss" in line for line in rounds)
    assert values["jobs"][0]["round"] == values["jobs"][0]["rounds"] == 5
    assert values["jobs"][0]["bytes_up"] == sum(line["bytes_up"] for line in rounds) > 0
    head = json.loads(league.ledger.all("SELECT head FROM rounds WHERE round = 5")[0]["head"])
    assert values["log"]["head"]["root"] == head["root"] and values["log"]["fault"] == ""
    events.close()


def test_who_comes_back_is_told_what_he_missed(league: League) -> None:
    league.join_all()
    first = Events(league)
    first.next()
    first.close()
    job = league.submit(tree(4))
    league.ended(job)
    again, rounds = Events(league, first.last), list[int]()
    while len(rounds) < 4:
        kind, data = again.next()
        rounds += [line["round"] for line in data["rounds"].get(job, ())]
        assert kind == "change"
    assert rounds == [1, 2, 3, 4]
    again.close()
    league.stop()
    league.start()
    anew = Events(league, again.last)
    kind, data = anew.next()
    assert kind == "snapshot" and len(data["rounds"][job]) == 4, "another process, another life"
    anew.close()


def test_so_many_listen_and_the_next_is_told_to_come_later(league: League) -> None:
    all = [Events(league) for _ in range(SUBSCRIBERS)]
    for events in all:
        events.next()
    status, headers, data = ask(league, "/events")
    assert status == 503 and "too many" in data["error"] and headers["Retry-After"]
    for events in all:
        events.close()
    until(lambda: ask_events(league) == 200)  # the places of disconnected subscribers are free again


def ask_events(league: League) -> int:
    events = Events(league)
    events.close()
    return events.got.status


def test_one_who_reads_nothing_is_cut_off_and_holds_nobody_up(league: League) -> None:
    page = league.aggregator.admin.page
    assert page is not None
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", league.aggregator.admin.port))
        slow.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        quick = Events(league)
        quick.next()
        until(lambda: page.stream.subscribers == 2)
        began = time.monotonic()
        for n in range(300):  # changes far faster than a real one
            league._loop.call_soon_threadsafe(page.stream.update, {"n": n, "much": f"{n}" * 30_000}, {})
            if n % 20 == 0:
                while quick.next()[1]["values"].get("n") != n:
                    pass
        until(lambda: page.stream.subscribers == 1)
        assert time.monotonic() - began < PATIENCE
    quick.close()


def test_listeners_are_let_go_as_the_aggregator_ends(league: League) -> None:
    events = Events(league)
    events.next()
    seen: list[dict[str, Any]] = []

    def listen() -> None:
        kind, data = events.next()
        while kind != "over":
            seen.append(data)
            kind, data = events.next()

    thread = threading.Thread(target=listen)
    thread.start()
    league.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive() and seen[-1]["values"]["about"]["closing"] is True
    events.close()
    league.start()


def test_nobody_looks_at_the_record_while_nobody_looks_at_the_page(
    league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    plain = Live.look

    def look(self: Live) -> Any:
        looks.append(time.monotonic())
        return plain(self)

    monkeypatch.setattr(Live, "look", look)
    time.sleep(0.6)
    assert not looks
    events = Events(league)
    events.next()
    assert looks
    events.close()


def test_names_with_a_plus_are_served_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the query of a URL a plus that is not quoted means a space."""
    monkeypatch.setattr(agent, "HEARTBEAT", 0.02)  # an ask that is not found is abandoned
    monkeypatch.setattr(approval_gate, "POLL", 1.0)
    monkeypatch.setattr(runtime, "TICK", 0.05)
    league = League(tmp_path / "league", ("ann+", "bob"), **ADMIN)
    operator, chief = league.operator, league.chief()
    league.join("bob", samples(1))
    approvals = Approvals(league.join("ann+", samples(0), '[approve]\nmode = "ask"\n').store.folder)
    algorithm = {"name": "fedcomed+", "local": {"steps": 200}}
    job, _ = operator.submit(parse({**tree(), "algorithm": algorithm}), "fedcomed+")
    league.until(lambda: "approval of the owners of: ann+" in str(league.shown(job)["reason"]))
    approvals.decide(job, approvals.announced(job) or b"", True)
    league.ended(job)
    ended = operator.job(job)
    assert (job, ended["status"], ended["absent"]) == ("fedcomed+-1", "finished", {})
    assert [(one["job"], one["name"]) for one in operator.jobs()] == [(job, "fedcomed+")]
    shown = [chief.call("GET", f"/v1/jobs/{quoted}").body for quoted in (job, "fedcomed%2B-1")]
    assert shown[0] == shown[1] and json.loads(shown[0])["rounds"][-1]["members"] == ["ann+", "bob"]
    assert hashlib.sha256(operator.pull(job, tmp_path / job).read_bytes()).hexdigest() == ended["model"]
    assert operator.log(job) and not operator.stop(job)
    status, started = post(league, "/start", {"name": "zeno++", "experiment": EXPERIMENT.format(rounds=9)})
    assert (status, started["job"]) == (200, "zeno++-1")
    assert post(league, "/stop", {"job": "zeno++-1"}) == (200, {"job": "zeno++-1", "stopped": True})
    events = Events(league)
    values = events.next()[1]["values"]
    assert {one["job"] for one in values["jobs"]} == {job, "zeno++-1"} and "party:ann+" in values
    events.close()
    assert operator.revoke("ann+") == 1 and operator.invite("ann+").name == "ann+.token"
    with pytest.raises(HansaError, match="a name is 1 to 64"):  # the job's id is longer than its name
        operator.submit(parse(tree()), "a" * 63)
    league.close()


# Parties


def test_a_reason_has_no_number_where_the_run_has_a_least_cohort(league: League) -> None:
    def refused(job: dict[str, Any]) -> str:
        """The displayed state of Ann, who refuses, while Bob is pending."""
        live, end = Live(league.runner), time.monotonic() + PATIENCE
        id = league.submit(job, min_parties=2)
        while True:
            values, _ = live.look()
            told = values.get(f"now:{id}", {}).get("of", {}).get("ann", "")
            if told.startswith("refused"):
                league.runner.stop(id)
                league.ended(id)
                return str(told)
            assert time.monotonic() < end, values
            time.sleep(0.02)

    league.enrolled("bob")
    league.join("ann", samples(0), "min_cohort = 77\n")
    assert "77" in refused(tree())
    told = refused(tree(min_cohort=2))
    assert not [letter for letter in told if letter.isdigit()], told


def test_revoked_parties_and_rejected_replies_are_shown(league: League) -> None:
    live = Live(league.runner)
    league.enrolled("ann")
    ask = "INSERT INTO replies (job, round, phase, number, party, size, staged, why, seconds, rejected) VALUES "
    for round in range(3):
        league.ledger.now(lambda db, round=round: db.run(f"{ask} ('j-1', ?, 'round', 0, 0, 0, 0, ?, 0, 1)", round,
                                                         f"reason {round}").rowcount)  # type: ignore[misc]  # fmt: skip
    values, _ = live.look()
    ann = values["party:ann"]
    assert (ann["state"], ann["here"], ann["rejected"], ann["reason"]) == (
        "enrolled",
        True,
        3,
        "j-1, round 3: reason 2",
    )
    assert abs(ann["seen"] - time.time()) < 3600
    bob = values["party:bob"]
    assert (bob["state"], bob["here"], bob["seen"], bob["rejected"]) == ("invited", False, None, 0)
    league.operator.revoke("ann")
    values, _ = live.look()
    assert values["party:ann"]["state"] == "revoked" and not values["party:ann"]["here"]
    assert values["party:ann"]["rejected"] == 3, "each is counted once"


def test_of_very_many_parties_those_with_trouble_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hansa.net.aggregator.live.ROWS", 2)
    league = League(tmp_path / "league", ("ann", "bob", "cid", "dan"), **ADMIN)
    for name in ("ann", "bob", "cid"):
        league.enrolled(name)
    values, _ = Live(league.runner).look()
    rows = {name for name in values if name.startswith("party:")}
    assert values["parties"] == {"total": 4, "here": 3} and len(rows) == 2 and "party:dan" in rows
    league.close()


# The log


def test_a_log_that_was_changed_does_not_verify(league: League) -> None:
    league.join_all()
    league.ended(league.submit(tree(2)))
    authority = (league.folder / "ca.pem").read_bytes()
    whole = Verifier(league.ledger, authority)
    assert verified(whole)["fault"] == ""
    seq = league.events("round closed")[0]["seq"]
    league.ledger.now(lambda db: db.run("UPDATE log SET at = at + 1 WHERE seq = ?", seq).rowcount)
    fault = verified(Verifier(league.ledger, authority))["fault"]
    assert f"entry {seq}" in fault and "root" in fault
    assert verified(whole)["fault"] == "", "it has not looked again yet"
    whole._begun -= 1e6
    assert verified(whole)["fault"] == fault, "it looks at all of it again after a while"


def verified(verifier: Verifier) -> dict[str, Any]:
    found = verifier.look()
    while found["verified"] < found["size"] and not found["fault"]:
        found = verifier.look()
    return found


# The token


def test_a_wrong_token_does_nothing_and_too_many_are_not_looked_at_while_the_right_one_always_is(
    league: League,
) -> None:
    job = league.submit(tree())
    wrong = ("", "x", token(league)[:-1], token(league) + "x", "\u00e9")
    for shown in wrong[:4]:
        assert post(league, "/stop", {"job": job}, shown)[0] == 401
    assert ask(league, "/stop", "POST", {"job": job})[0] == 401
    assert ask(league, "/stop", "POST", {"job": job}, {"Authorization": f"Basic {token(league)}"})[0] == 401
    assert league.shown(job)["status"] == "running"
    assert post(league, "/token", "x" * (BODY + 1), "x")[0] == 413  # its token is not looked at
    statuses = [post(league, "/token", {}, "x")[0] for _ in range(WRONG)]
    assert statuses[0] == 401 and statuses[-1] == 429
    assert post(league, "/token", {})[0] == 200
    assert post(league, "/stop", {"job": job}) == (200, {"job": job, "stopped": True})


def test_another_sites_page_can_do_nothing_even_with_the_token(league: League) -> None:
    job, host = league.submit(tree()), f"127.0.0.1:{league.aggregator.admin.port}"
    for given in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": f"https://{host}"},
                  {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):  # fmt: skip
        assert post(league, "/stop", {"job": job}, **given)[0] == 403, given
    assert league.shown(job)["status"] == "running"
    assert post(league, "/stop", {"job": job}, Origin=f"http://{host}")[0] == 200


def test_without_a_token_the_page_only_shows_and_a_new_one_counts_at_once(league: League) -> None:
    old, path = token(league), league.folder / ADMIN_TOKEN
    assert path.stat().st_mode & 0o777 == 0o600 and len(old) >= 40
    path.unlink()
    assert post(league, "/token", {}, old)[0] == 401 and post(league, "/token", {}, "")[0] == 401
    assert not Live(league.runner, league.aggregator.admin.page.source._about).look()[0]["about"]["stops"]
    new_admin_token(league.folder)
    assert post(league, "/token", {}, old)[0] == 401 and post(league, "/token", {})[0] == 200
    os.chmod(path, 0o644)
    assert post(league, "/token", {})[0] == 401, "others could have read it"
    path.write_text("\n")
    os.chmod(path, 0o600)
    assert post(league, "/token", {}, "")[0] == 401, "nothing is no token"


def test_the_command_makes_a_token_and_says_where_it_lies(league: League, capsys: pytest.CaptureFixture[str]) -> None:
    old = token(league)
    app(["admin-token", str(league.folder), "--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert Path(told["admin_token"]) == league.folder / ADMIN_TOKEN and token(league) != old
    assert token(league) not in json.dumps(told)


@pytest.mark.parametrize("body, status", [
    ("x" * (BODY + 1), 413), ([1], 400), ({"job": 1}, 400), ({"job": "nothing-1"}, 400), ({}, 400),
])  # fmt: skip
def test_a_body_that_is_none_gets_a_sentence(league: League, body: Any, status: int) -> None:
    got, data = post(league, "/stop", body)
    assert got == status and data["error"]


def test_a_stopped_job_is_stopped_for_good_and_the_log_says_by_whom(league: League) -> None:
    job = league.submit(tree(), min_parties=3)  # no party is connected: the job waits
    assert post(league, "/stop", {"job": job}) == (200, {"job": job, "stopped": True})
    assert league.ended(job)["status"] == "stopped"
    assert post(league, "/stop", {"job": job}) == (200, {"job": job, "stopped": False})
    asked, ended = league.events("stop asked for"), league.events("job stopped")
    assert json.loads(asked[0]["detail"]) == {"by": "admin's token"} and asked[0]["job"] == ended[0]["job"] == job
    league.stop()
    league.start()
    assert league.shown(job)["status"] == "stopped" and job not in league.runner.under_way
    assert verified(Verifier(league.ledger, (league.folder / "ca.pem").read_bytes()))["fault"] == ""


def test_a_job_is_started_as_submit_does_and_the_log_says_by_whom(league: League) -> None:
    league.join_all()
    status, data = post(league, "/start", {"name": "heart", "experiment": EXPERIMENT.format(rounds=2)})
    assert status == 200 and data["job"] == "heart-1" and any("own data" in note for note in data["notes"])
    assert league.ended("heart-1")["status"] == "finished"
    detail = json.loads(league.events("job submitted")[0]["detail"])
    assert detail["by"] == "admin's token" and detail["experiment"]["run"] == {"rounds": 2}
    by = json.loads(league.events("job submitted")[0]["detail"])["by"]
    assert league.submit(tree()) and json.loads(league.events("job submitted")[1]["detail"])["by"] != by


@pytest.mark.parametrize("change, about", [
    ("model = 'logistic'\ntest = '/etc/passwd'", "may not name files or functions here"),
    ("model = 'logistic'\ntrusted = 'a.csv'", "may not name files or functions here"),
    ("model = 'os:getcwd'", "not among serve.functions"),
    ("model = 'logistic'\ndata_dir = '/etc'", "may not name a folder here"),
    ("model = 'nothing'", "nothing"),
    ("model = ", "not valid TOML"),
    ("model = 'logistic'\n[adversary]\nname = 'sign-flip'", "adversar"),
])  # fmt: skip
def test_an_experiment_that_may_not_be_started_here_gets_a_sentence(league: League, change: str, about: str) -> None:
    text = EXPERIMENT.format(rounds=2).replace('model = "logistic"', change)
    status, data = post(league, "/start", {"name": "x", "experiment": text})
    assert status == 400 and about in data["error"] and "\n" not in data["error"]
    assert not league.events("job submitted")


def test_a_function_that_loads_data_is_never_called(league: League, tmp_path: Path) -> None:
    text = '[task]\ndataset = "os:getcwd"\nmodel = "logistic"'
    status, data = post(league, "/start", {"name": "x", "experiment": text})
    assert status == 400 and "may not name a function here" in data["error"]
    status, data = post(league, "/start", {"name": "../x", "experiment": EXPERIMENT.format(rounds=1)})
    assert status == 400 and not league.events("job submitted")
