"""Enrolment, rotation and revocation: which certificates are valid, and until when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from league import PATIENCE, Answered, Asked, Caller, League, samples

from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.aggregator.process import Aggregator
from hansa.net.party.store import PartyStore
from hansa.net.transport import certificates, keys
from hansa.net.transport import client as clients
from hansa.net.transport.client import Client, Refusal
from hansa.net.transport.signing import About
from hansa.net.transport.wire import PROTOCOLS, Enrolment, IssuedCertificate, pack, unpack
from hansa.plumbing.errors import ConfigError, HansaError


def enrol(league: League, secret: str, name: str, key: keys.PrivateKey | None = None) -> Answered:
    return league.nobody().call(
        "POST", "/v1/enrol", pack(Enrolment(secret, certificates.make_request(key or keys.new_key(), name)))
    )


def rotated(caller: Caller, key: keys.PrivateKey, name: str = "ann") -> Answered:
    return caller.call("POST", "/v1/rotate", certificates.make_request(key, name), About())


def alive(caller: Caller) -> int:
    return caller.call("POST", f"/v1/alive?instance={caller.instance}").status


def test_a_token_is_good_for_one_key_and_the_same_key_gets_the_same_certificate(league: League) -> None:
    secret, key = league.token("ann").secret, keys.new_key()
    first = enrol(league, secret, "ann", key)
    assert first.status == 200
    given = unpack(first.body, IssuedCertificate)
    who = certificates.identity_of_pem(given.certificate)
    assert (given.party, given.federation, who.name, who.role) == ("ann", "league", "ann", "party")
    assert who.key == key.public_key()
    assert enrol(league, secret, "ann", key).body == first.body
    other = enrol(league, secret, "ann")
    assert other.status == 403 and "was already used" in other.error
    assert enrol(league, secret, "ann", key).body == first.body
    assert [entry["party"] for entry in league.events("enrolled")] == ["ann"]


def test_a_token_is_for_its_party_and_its_federation_alone(league: League, found: Callable[..., League]) -> None:
    secret = league.token("ann").secret
    for name in ("bob", "ANN", "operator", "nobody"):
        got = enrol(league, secret, name)
        assert got.status == 403 and "unknown token" in got.error
    assert enrol(league, "x" * 43, "ann").status == 403
    assert enrol(found(), secret, "ann").status == 403
    assert league.events("denied") == []  # requests of strangers must not make the ledger grow


def test_what_is_no_request_for_a_certificate_is_refused(league: League) -> None:
    secret = league.token("ann").secret
    for body in (b"", b"\xc1", pack(Enrolment(secret, b"none")), pack(Enrolment("", b"")), b"x" * 1000):
        got = league.nobody().call("POST", "/v1/enrol", body)
        assert got.status in (400, 403) and "\n" not in got.error and secret not in got.error


def test_an_expired_or_void_token_is_refused(league: League) -> None:
    old = league.token("ann")
    league.operator.invite("ann")
    assert "expired" in enrol(league, old.secret, "ann").error
    fresh = league.token("ann")
    league.ledger.now(lambda db: db.run("UPDATE tokens SET expires = 1 WHERE digest = ?", fresh.digest()).rowcount)
    got = enrol(league, fresh.secret, "ann")
    assert got.status == 403 and "expired" in got.error


@pytest.mark.parametrize("name", ["Ann", "ANN", "ann.", "bOb..."])
def test_a_party_whose_name_looks_like_another_ones_is_not_invited(league: League, name: str) -> None:
    with pytest.raises(HansaError, match=f"the party names '{name}' and '(ann|bob)' differ only in case"):
        league.operator.invite(name)
    assert name not in [party["name"] for party in league.operator.parties()]
    assert not (league.folder / "tokens" / f"{name}.token").exists()


@pytest.mark.parametrize("names", [["ann", "Ann"], ["ann", "bob", "ANN."]])
def test_a_federation_has_no_two_names_that_look_alike(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(ConfigError, match="and 'ann' differ only in case"):
        init(tmp_path / "f", "f", names, [], 8443)
    assert not (tmp_path / "f").exists()


def test_a_new_party_is_invited_and_an_old_one_enrols_again(league: League) -> None:
    ann = league.enrolled("ann")
    league.operator.invite("dora")
    dora = league.enrolled("dora")
    assert league.number("dora") == 3 and alive(dora) == 204
    league.operator.invite("ann")
    again = league.enrolled("ann")
    assert alive(again) == 204 and alive(ann) == 403
    assert league.number("ann") == 0


def test_nothing_secret_is_said_to_an_aggregator_of_another_authority(
    league: League, found: Callable[..., League], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = found()
    said: list[str] = []
    call = Client.call

    async def listening(self: Client, method: str, path: str, *given: object, **more: object) -> object:
        said.append(path)
        return await call(self, method, path, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Client, "call", listening)
    with pytest.raises(HansaError, match="not the aggregator that issued the token") as caught:
        asyncio.run(clients.enrol(other.url, league.token("ann"), certificates.make_request(keys.new_key(), "ann")))
    assert said == ["/v1/ca"] and "\n" not in str(caught.value)


def test_an_aggregator_that_shows_the_right_authority_and_has_not_its_key_hears_no_secret(
    league: League, found: Callable[..., League]
) -> None:
    """Anybody can pass on the authority's certificate; only the aggregator has a certificate issued by it."""
    other = found()
    (other.folder / "ca.pem").write_bytes((league.folder / "ca.pem").read_bytes())
    with pytest.raises(HansaError, match="failed the TLS check of its certificate"):
        asyncio.run(clients.enrol(other.url, league.token("ann"), certificates.make_request(keys.new_key(), "ann")))
    assert other.events("denied") == []


def test_an_old_certificate_counts_until_the_new_one_is_used(league: League) -> None:
    old, key = league.enrolled("ann"), keys.new_key()
    got = rotated(old, key)
    assert got.status == 200 and alive(old) == 204
    new = league.certified("ann", key, unpack(got.body, IssuedCertificate).certificate)
    assert alive(old) == 204
    assert alive(new) == 204
    assert alive(old) == 403 and alive(new) == 204
    assert rotated(old, keys.new_key()).status == 403
    states = {row["fingerprint"]: row["state"] for row in league.ledger.all("SELECT * FROM certificates")}
    assert sorted(states.values()) == ["superseded", "valid", "valid"]  # the operator's too
    assert len(league.events("certificate rotated")) == 1


def test_a_lost_answer_to_a_rotation_locks_nobody_out(league: League) -> None:
    old, key = league.enrolled("ann"), keys.new_key()
    first = rotated(old, key)
    assert alive(old) == 204
    again = rotated(old, key)
    assert again.body == first.body
    other = rotated(old, keys.new_key())
    assert other.body != first.body and alive(old) == 204


def test_nobody_rotates_into_another_party(league: League) -> None:
    ann = league.enrolled("ann")
    got = rotated(ann, keys.new_key(), "bob")
    assert got.status == 403 and "may not request a certificate for bob" in got.error


def test_a_party_rotates_and_a_crash_at_any_moment_does_not_lock_it_out(
    league: League, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PartyStore(tmp_path / "home")

    async def hello() -> None:
        async with store.client() as client:
            await client.call("POST", f"/v1/alive?instance={store.registration()['instance']}")

    async def rotate() -> None:
        async with store.client() as client:
            await store.rotate(client)

    asyncio.run(store.enrol(league.url, league.token("ann")))
    asyncio.run(hello())
    first = store.identity()
    with monkeypatch.context() as patch:  # the certificate has arrived, and is half on disk

        def half(path: Path, data: bytes) -> None:
            part = path.with_name(path.name + ".part")
            part.write_bytes(data[: len(data) // 2])
            raise KeyboardInterrupt

        write = keys.write_private
        patch.setattr(keys, "write_private", lambda path, data: (half if "cert" in path.name else write)(path, data))
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(rotate())
    store.install_new_keys()
    asyncio.run(hello())
    assert store.identity() == first
    with monkeypatch.context() as patch:  # on disk, and the key is not yet in use
        patch.setattr(PartyStore, "install_new_keys", lambda self: None)
        asyncio.run(rotate())
    asyncio.run(hello())
    store.install_new_keys()
    assert store.identity() != first
    asyncio.run(hello())
    store._lock.close()


def test_revocation_takes_effect_on_an_open_connection(league: League) -> None:
    ann, bob = league.enrolled("ann"), league.enrolled("bob")
    assert alive(ann) == 204
    assert league.operator.revoke("ann") == 1
    assert alive(ann) == 403 and alive(bob) == 204
    assert enrol(league, league.token("ann").secret, "ann", ann.key).status == 403
    league.stop()
    league.start()
    assert alive(league.caller(ann.key, ann.files, "ann")) == 403
    assert [entry["party"] for entry in league.events("revoked")] == ["ann"]


def test_a_question_for_work_that_is_held_open_ends_when_its_party_is_revoked(league: League) -> None:
    ann = league.enrolled("ann")
    got: list[Answered] = []
    asking = threading.Thread(target=lambda: got.append(ann.call("GET", f"/v1/work?instance={ann.instance}")))
    asking.start()
    league.until(lambda: 0 in league.queue._polls)
    league.operator.revoke("ann")
    asking.join(PATIENCE)
    assert got and got[0].status == 403
    league.ask(parties=(0,))
    assert league.queue.present([0]) == [], "who is revoked is not waited for"


def test_a_certificate_that_was_revoked_before_its_first_use_stays_so(league: League) -> None:
    key = keys.new_key()
    given = unpack(enrol(league, league.token("ann").secret, "ann", key).body, IssuedCertificate)
    who = certificates.identity_of_pem(given.certificate)
    used = league.aggregator.registry.used(who)
    assert used is not None
    league.ledger.now(league.aggregator.registry.revoke("ann"))
    league.ledger.now(used)  # it arrived at the same moment
    league.aggregator.registry.reload()
    assert not league.aggregator.registry.admits(who)


def test_a_certificate_ends_at_its_date_on_an_open_connection(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    ann = league.enrolled("ann")
    end = certificates.identity_of_pem(ann.files[0].read_bytes()).not_after  # type: ignore[index]
    monkeypatch.setattr("hansa.net.aggregator.registry.time.time", lambda: end + 1)
    assert alive(ann) == 403


def test_revoking_a_party_that_is_none_says_so(league: League) -> None:
    with pytest.raises(Refusal, match=r"no party 'anna'.*ann"):
        league.operator.revoke("anna")


@pytest.mark.parametrize("name", ["ca.key", "server.key", "tokens/ann.token"])
def test_an_aggregator_refuses_private_files_that_others_may_read(league: League, name: str) -> None:
    league.stop()
    (league.folder / name).chmod(0o644)
    try:
        if name == "server.key":  # it is renewed at every start
            with pytest.raises(ConfigError, match="mode 0644"):
                FederationFolder.open(league.folder).private(name)
        else:
            with pytest.raises(ConfigError, match=r"is accessible to others \(mode 0644\)") as caught:
                Aggregator(FederationFolder.open(league.folder))
            assert "\n" not in str(caught.value)
    finally:
        (league.folder / name).chmod(0o600)
        league.start()


def test_an_operator_and_a_party_refuse_keys_that_others_may_read(league: League, tmp_path: Path) -> None:
    (league.folder / "operator.key").chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        league.operator.jobs()
    store = PartyStore(tmp_path / "home")
    asyncio.run(store.enrol(league.url, league.token("ann")))
    (store.folder / "key.pem").chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640"):
        store.client()
    store._lock.close()


@pytest.mark.slow
def test_one_process_at_a_time_serves_a_federation_or_runs_a_party(league: League, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another process serves"):
        Aggregator(FederationFolder.open(league.folder))
    store = PartyStore(tmp_path / "home")
    with pytest.raises(ConfigError, match="another process runs this party"):
        PartyStore(tmp_path / "home")
    store._lock.close()


def test_the_state_is_private(league: League) -> None:
    league.enrolled("ann")
    for path in (league.folder / "state", league.folder / "tokens", league.folder / "state" / "blobs"):
        assert path.stat().st_mode & 0o077 == 0
    assert (league.folder / "state" / "hansa.db").stat().st_mode & 0o077 == 0


def test_a_party_of_another_version_is_told_and_goes(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PROTOCOLS", (max(PROTOCOLS) + 1,))
    store = PartyStore(league.folder / "homes" / "ann")
    with pytest.raises(Refusal, match=r"this aggregator speaks version 2 .* version 3; install the same") as caught:
        asyncio.run(store.enrol(league.url, league.token("ann")))
    assert caught.value.status == 426
    store._lock.close()
    monkeypatch.undo()
    member = league.join("ann", samples(0))
    member.leave()
    monkeypatch.setattr(clients, "PROTOCOLS", (7,))
    member = league.members["ann"] = type(member)(league, "ann", samples(0))
    member.gone()
    assert isinstance(member.failure, Refusal) and member.failure.status == 426


def test_a_revoked_party_is_sent_away_with_a_sentence(league: League) -> None:
    member = league.join("ann", samples(0))
    league.operator.revoke("ann")
    member.gone()
    assert isinstance(member.failure, Refusal) and "enrol again with a new token" in str(member.failure)


def test_party_a_sees_nothing_of_party_b(league: League) -> None:
    ann, bob = league.enrolled("ann"), league.enrolled("bob")
    ask = league.ask(parties=(1,))
    assert bob.call("GET", f"{ask.path}/message").body == b"message"
    assert bob.call("GET", f"{ask.path}/task").body == b"task"
    blob = bob.upload(ask, b"what bob found")
    for path in ("message", "task", f"parts/{blob.digest}"):
        got = ann.call("GET", f"{ask.path}/{path}")
        assert got.status == 404 and "ann is not asked" in got.error
    assert ann.put(ask, blob.digest, 0, b"what bob found").status == 404
    assert Asked() == ask
