"""Parties that require attestation, over mutual TLS: what they send, to whom, and what they refuse."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import snp
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from league import League, Member, samples

from hansa.net.aggregator.attesting import EvidenceCommand
from hansa.net.aggregator.party_routes import PartyRoutes
from hansa.net.attestation import Evidence, bound_data
from hansa.net.attestation.guard import KeyPin
from hansa.net.attestation.verifier import public_key_bytes
from hansa.net.transport.certificates import parse_certificate
from hansa.net.transport.http import Refused
from hansa.net.transport.wire import pack, unpack
from hansa.plumbing.errors import ConfigError

TREE = {"task": {"parties": ["x"], "model": "logistic", "dtype": "float64"},
        "algorithm": {"name": "fedavg", "local": {"name": "sgd", "lr": 0.1}},
        "run": {"rounds": 2, "seed": 3, "eval_parties": False}}  # fmt: skip
Found = Callable[..., League]


@functools.cache
def chain() -> snp.Chain:
    return snp.make_chain()


def policy(platform: Path, measurement: str = snp.MEASUREMENT, **more: Any) -> str:
    fields = "".join(f"{name} = {json.dumps(value)}\n" for name, value in more.items())
    return (f'[trust.attestation]\nname = "sev-snp"\nmeasurements = ["{measurement}"]\n'
            f'roots = "{platform / "roots.pem"}"\n{fields}')  # fmt: skip


@pytest.fixture
def platform(tmp_path: Path) -> Path:
    snp.install(tmp_path / "platform", chain())
    return tmp_path / "platform"


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The routes that clients with certificates use, with their names."""
    calls: list[tuple[str, str]] = []
    routes = PartyRoutes.routes

    def noted(self: PartyRoutes) -> Any:
        def watch(route: Any) -> Any:
            async def handler(call: Any) -> Any:
                if call.identity is not None:
                    calls.append((call.name, route.path.rpartition("/")[2]))
                return await route.handler(call)

            return dataclasses.replace(route, handler=handler)

        return [watch(route) if route.role == "party" else route for route in routes(self)]

    monkeypatch.setattr(PartyRoutes, "routes", noted)
    return calls


def refused(league: League, text: str) -> str:
    """Why a party refuses the aggregator."""
    member = Member(league, "ann", samples(0), text)
    league.members["ann"] = member
    member.gone()
    assert isinstance(member.failure, ConfigError), member.failure
    message = str(member.failure)
    assert message.startswith(f"this party refuses the aggregator of league at {league.url}: "), message
    assert "\n" not in message
    return message


def test_attested_parties_train_and_each_attests_first(
    found: Found, platform: Path, used: list[tuple[str, str]]
) -> None:
    league = found(evidence=snp.install(platform, chain()))
    for number, name in enumerate(("ann", "bob", "cid")):
        league.join(name, samples(number), policy(platform) if name != "cid" else "")
    ended = league.ended(league.submit(TREE))
    assert ended["status"] == "finished", ended["reason"]
    for name in ("ann", "bob"):
        assert next(path for who, path in used if who == name) == "attest"
    assert ("cid", "attest") not in used
    nonces = (platform / "calls").read_text().split()
    assert len(nonces) == len(set(nonces)) >= 2  # a nonce is used once


@pytest.mark.parametrize(("fields", "settings", "message"), [
    ({"measurement": "cd" * 48}, {}, "is not on this party's list"),
    ({"data": "00" * 64}, {}, "was not made for this connection"),
    ({"policy": 0x30000 | 1 << 19}, {}, "may be debugged"),
    ({}, {"tcb": {"microcode": 214}}, "requires 214"),
], ids=["measurement", "replay", "debug", "firmware"])  # fmt: skip
def test_an_aggregator_that_is_not_accepted_gets_nothing(
    fields: dict[str, Any], settings: dict[str, Any], message: str, found: Found, platform: Path,
    used: list[tuple[str, str]],
) -> None:  # fmt: skip
    league = found(evidence=snp.install(platform, chain(), **fields))
    text = policy(platform, **settings) if not settings else policy(platform) + "tcb = { microcode = 214 }\n"
    assert message in refused(league, text)
    assert set(used) == {("ann", "attest")}  # no poll, no vault, no answer


def test_an_aggregator_without_evidence_is_refused(found: Found, platform: Path) -> None:
    assert "it has no attestation evidence" in refused(found(), policy(platform))


def test_evidence_of_another_kind_is_refused(found: Found, platform: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sh"
    other.write_text('#!/bin/sh\necho \'{"kind": "tdx", "report": ""}\'\n')
    other.chmod(0o700)
    message = refused(found(evidence=(str(other),)), policy(platform))
    assert "its evidence is of the kind 'tdx'; this party requires 'sev-snp'" in message


def test_a_restarted_aggregator_has_another_key_and_is_attested_again(found: Found, platform: Path) -> None:
    league = found(evidence=snp.install(platform, chain()))
    league.join("ann", samples(0), policy(platform))
    before = len((platform / "calls").read_text().split())
    league.stop()
    league.start()
    league.until(lambda: len((platform / "calls").read_text().split()) > before)
    assert league.ended(league.submit(TREE, min_parties=1))["status"] == "finished"
    assert league.members["ann"].failure is None


def test_a_restarted_aggregator_with_another_program_is_refused(found: Found, platform: Path) -> None:
    league = found(evidence=snp.install(platform, chain()))
    member = league.join("ann", samples(0), policy(platform))
    league.stop()
    snp.install(platform, chain(), measurement="cd" * 48)
    league.start()
    member.gone()
    assert isinstance(member.failure, ConfigError) and "is not on this party's list" in str(member.failure)


def test_another_server_that_relays_the_evidence_of_the_attested_one_gets_nothing(
    found: Found, platform: Path, used: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    league = found(evidence=snp.install(platform, chain()))
    attested = Path(league.folder / "server.pem").read_bytes()  # the key in the trusted environment
    member = league.join("ann", samples(0), policy(platform))
    league.stop()
    used.clear()
    real = PartyRoutes.attest

    async def relayed(self: PartyRoutes, call: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(type(self.registry.federation), "read", lambda folder, name: attested)
            return await real(self, call)

    monkeypatch.setattr(PartyRoutes, "attest", relayed)
    league.start()  # another key, signed by the same authority
    member.gone()
    assert isinstance(member.failure, ConfigError) and "was not made for this connection" in str(member.failure)
    assert set(used) <= {("ann", "attest")}


def test_a_new_connection_is_attested_before_the_next_work(found: Found, platform: Path) -> None:
    league = found(evidence=snp.install(platform, chain()))
    member = league.join("ann", samples(0), policy(platform))
    pin = member.store.pin
    assert pin is not None and pin.attested
    before = len((platform / "calls").read_text().split())
    snp.install(platform, chain(), measurement="cd" * 48)  # as if another program ran, with the same key
    pin.meet(league_certificate(league))  # a handshake: that of a second connection
    assert not pin.attested
    league.submit({**TREE, "run": {**TREE["run"], "rounds": 1}}, min_parties=1)
    member.gone()
    assert len((platform / "calls").read_text().split()) == before + 1
    assert isinstance(member.failure, ConfigError) and "is not on this party's list" in str(member.failure)
    assert not league.ledger.all("SELECT 1 FROM replies")


def league_certificate(league: League) -> bytes:
    return parse_certificate((league.folder / "server.pem").read_bytes()).public_bytes(serialization.Encoding.DER)


def test_another_key_fails_in_the_handshake() -> None:
    pin = KeyPin()
    first, second = (snp.make_chain().certificate for _ in range(2))
    der = [der_of(pem) for pem in (first, second)]
    pin.meet(der[0])
    pin.attested = True
    with pytest.raises(ssl.SSLCertVerificationError, match="its TLS key is another one"):
        pin.meet(der[1])
    assert pin.attested and pin.changed
    with pytest.raises(ssl.SSLCertVerificationError):
        pin.meet(None)


def der_of(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize(("script", "message"), [
    ("exit 3", "serve.evidence ended with status 3"), ("echo '{'", "the aggregator's evidence is invalid"),
    ("head -c 1000000 /dev/zero", "serve.evidence printed more than 524288 bytes"),
    (None, "cannot run serve.evidence: No such file"),
])  # fmt: skip
def test_a_command_that_makes_no_evidence_is_one_sentence_and_may_be_tried_again(
    script: str | None, message: str, found: Found, tmp_path: Path
) -> None:
    command = tmp_path / "evidence.sh"
    if script is not None:
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o700)
    answer = found(evidence=(str(command),)).enrolled("ann").call("POST", "/v1/attest", b"n" * 32)
    assert answer.status == 503 and message in answer.error


def test_the_route_is_for_parties_and_takes_nonces_alone(found: Found, platform: Path) -> None:
    league = found(evidence=snp.install(platform, chain()))
    assert league.nobody().call("POST", "/v1/attest", b"n" * 32).status == 401
    ann = league.enrolled("ann")
    for body in (b"", b"n" * 31, b"n" * 33):
        answer = ann.call("POST", "/v1/attest", body)
        assert answer.status == 400 and "expected 32" in answer.error
    answer = ann.call("POST", "/v1/attest", b"n" * 32)
    evidence = unpack(answer.body, Evidence)
    key = public_key_bytes(x509.load_der_x509_certificate(league_certificate(league)))
    assert evidence.report[0x50:0x90] == bound_data(key, b"n" * 32)
    assert pack(evidence) == answer.body


def test_a_command_that_takes_too_long_is_ended() -> None:
    slow = EvidenceCommand(("/bin/sh", "-c", "sleep 600 & sleep 600"), seconds=0.1)
    with pytest.raises(Refused, match=r"serve.evidence took more than 0.1 s"):
        asyncio.run(slow.evidence(bytes(64)))
