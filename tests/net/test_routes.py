"""Which role may use which route: everything else is denied, for every client and every signature."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from league import SPOKEN, Asked, Caller, League, draft

from hansa.net.aggregator.server import Server
from hansa.net.transport import certificates, keys, signing
from hansa.net.transport.admission import Admission
from hansa.net.transport.limits import Limits
from hansa.net.transport.prometheus import Metrics
from hansa.net.transport.signing import About
from hansa.net.transport.wire import IssuedCertificate, pack, unpack

ASK = "/v1/jobs/{job}/asks/{round}/{phase}/{number}"
ROUTES = {  # method and path: the role, and whether it is signed
    ("GET", "/v1/ca"): ("anyone", False),
    ("POST", "/v1/enrol"): ("anyone", False),
    ("POST", "/v1/rotate"): ("party", True),
    ("GET", "/v1/work"): ("party", False),
    ("POST", "/v1/alive"): ("party", False),
    ("GET", ASK + "/message"): ("party", False),
    ("GET", ASK + "/task"): ("party", False),
    ("GET", ASK + "/public"): ("party", False),
    ("GET", ASK + "/manifest"): ("party", False),
    ("GET", ASK + "/parts/{digest}"): ("party", False),
    ("PUT", ASK + "/parts/{digest}"): ("party", True),
    ("POST", ASK + "/session"): ("party", False),
    ("POST", ASK + "/reply"): ("party", True),
    ("GET", "/v1/uploads/{digest}"): ("operator", False),
    ("PUT", "/v1/uploads/{digest}"): ("operator", True),
    ("GET", "/v1/parties"): ("operator", False),
    ("POST", "/v1/parties/{party}/invite"): ("operator", True),
    ("POST", "/v1/parties/{party}/revoke"): ("operator", True),
    ("GET", "/v1/jobs"): ("operator", False),
    ("POST", "/v1/jobs"): ("operator", True),
    ("GET", "/v1/jobs/{job}"): ("operator", False),
    ("POST", "/v1/jobs/{job}/stop"): ("operator", True),
    ("POST", "/v1/jobs/{job}/forget"): ("operator", True),
    ("GET", "/v1/jobs/{job}/model"): ("operator", False),
    ("GET", "/v1/log"): ("operator", False),
    ("GET", "/v1/log/head"): ("operator", False),
    ("GET", "/v1/log/lines"): ("operator", False),
    ("GET", "/v1/log/certificate"): ("party", False),
    ("GET", "/v1/vault"): ("party", False),
    ("POST", "/v1/attest"): ("party", False),
    ("POST", "/v1/relay"): ("party", False),
}
GUARDED = [(*route, *how) for route, how in ROUTES.items() if how[0] != "anyone"]
SIGNED = [(method, path, role) for (method, path), (role, signed) in ROUTES.items() if signed]
FILLED = {"job": "job-1", "round": "0", "phase": "round", "number": "0", "digest": "ab" * 32, "party": "cid"}


def filled(path: str) -> str:
    """A path that is valid in every other respect."""
    query = {"/v1/work": f"?instance={'1' * 32}", "/v1/alive": f"?instance={'1' * 32}"}.get(path, "")
    return path.format(**FILLED) + (query or ("?at=0" if path.endswith("{digest}") else ""))


def about(path: str) -> About:
    return Asked().about if path.startswith(ASK) else About()


@dataclass
class Scene:
    """A federation with all roles: no permission depends on what exists."""

    league: League
    parties: dict[str, Caller]
    operator: Caller
    revoked: Caller
    superseded: Caller


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    league = League(tmp_path_factory.mktemp("scene") / "league", ("ann", "bob", "cid", "dot", "eve"))
    parties = {name: league.enrolled(name) for name in ("ann", "bob")}
    revoked, superseded = league.enrolled("dot"), league.enrolled("eve")
    operator = league.chief()
    assert operator.call("POST", "/v1/parties/dot/revoke", b"", About()).status == 200
    fresh = keys.new_key()
    got = superseded.call("POST", "/v1/rotate", certificates.make_request(fresh, "eve"), About())
    assert got.status == 200
    new = league.certified("eve", fresh, unpack(got.body, IssuedCertificate).certificate)
    assert new.call("POST", f"/v1/alive?instance={'1' * 32}").status == 204
    league.ask(parties=(0,))
    yield Scene(league, parties, operator, revoked, superseded)
    league.close()


def test_the_routes_are_these_and_no_others() -> None:
    admission = Admission(Limits(), Metrics(), None, lambda: 0)  # type: ignore[arg-type]
    app = Server(*[None] * 5, admission).app()  # type: ignore[arg-type]
    found = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None}
    assert found - {("HEAD", path) for _, path in found} == set(ROUTES)
    heads = {path for method, path in found if method == "HEAD"}
    assert heads == set(), "a HEAD is a GET, and would need a row of its own"


@pytest.mark.parametrize(("method", "path", "role", "signed"), GUARDED)
def test_without_a_certificate_a_route_is_closed(scene: Scene, method: str, path: str, role: str, signed: bool) -> None:
    own = scene.parties["ann"].key if role == "party" else scene.operator.key
    got = scene.league.nobody().call(method, filled(path), b"", about(path), key=own)
    assert got.status == 401 and "certificate" in got.error


@pytest.mark.parametrize(("method", "path", "role", "signed"), GUARDED)
def test_the_wrong_role_a_revoked_and_a_superseded_certificate_are_denied(
    scene: Scene, method: str, path: str, role: str, signed: bool
) -> None:
    other = scene.operator if role == "party" else scene.parties["ann"]
    got = other.call(method, filled(path), b"", about(path))
    assert got.status == 403 and f"role {role}" in got.error
    for former in (scene.revoked, scene.superseded):
        got = former.call(method, filled(path), b"", about(path))
        assert got.status == 403 and "not valid here (any more)" in got.error


@pytest.mark.parametrize(("method", "path", "role"), SIGNED)
def test_a_signed_route_takes_no_other_signature(scene: Scene, method: str, path: str, role: str) -> None:
    caller = scene.parties["ann"] if role == "party" else scene.operator
    target, right, body = filled(path), about(path), b"body"
    stranger = scene.parties["bob"].key
    good = signing.sign(caller.key, method, target, body, right)  # type: ignore[arg-type]
    flipped = bytearray(base64.b64decode(good[signing.SIGNATURE]))
    flipped[0] ^= 1
    bad: list[dict[str, Any]] = [
        {"headers": {**good, signing.SIGNATURE: "-"}},
        {"headers": {**good, signing.NONCE: "-"}},
        {"headers": {**good, signing.SIGNATURE: base64.b64encode(bytes(flipped)).decode()}},
        {"headers": {**good, signing.NONCE: "0" * 32}},
        {"headers": signing.sign(caller.key, method, target, b"other", right)},  # type: ignore[arg-type]
        {"headers": signing.sign(caller.key, method, target + "x", body, right)},  # type: ignore[arg-type]
        {"headers": signing.sign(caller.key, "GET", target, body, right)},  # type: ignore[arg-type]
        {"about": right, "key": stranger},
        {"about": About("job-2", right.round, right.ask)},
        {"about": About(right.job, right.round + 1, right.ask)},
        {"about": About(right.job, right.round, "0/round/1")},
        {"about": About("x", 5, "y")},
    ]
    for given in bad:
        got = caller.call(method, target, body, **given)
        assert got.status == 401, (given, got)
        assert "sign" in got.error or "header" in got.error


def test_a_right_signature_is_let_in_everywhere(scene: Scene) -> None:
    """The control for the denials: they depend on the signature only."""
    for method, path, role in SIGNED:
        caller = scene.parties["ann"] if role == "party" else scene.operator
        got = caller.call(
            method, filled(path) if "revoke" not in path else "/v1/parties/nobody/revoke", b"x", about(path)
        )
        assert got.status not in (401, 403), (method, path, got)


def test_who_is_turned_away_is_in_the_log(scene: Scene) -> None:
    scene.parties["bob"].call("GET", "/v1/parties?x=1")
    scene.parties["bob"].call("POST", Asked().path + "/reply", pack(draft(why="no")), About("job-2", 0, "0/round/0"))
    scene.league.ledger.now(lambda db: None)
    rows = scene.league.ledger.all("SELECT * FROM log WHERE event = 'denied' ORDER BY seq DESC LIMIT 2")
    assert [row["party"] for row in rows] == ["bob", "bob"]
    assert '"path":"/v1/parties"' in rows[1]["detail"]


def test_the_authoritys_certificate_is_public_and_needs_no_version(scene: Scene) -> None:
    got = scene.league.nobody().call("GET", "/v1/ca", headers={"Hansa-Protocol": "-"})
    assert got.status == 200 and got.body == (scene.league.folder / "ca.pem").read_bytes()


@pytest.mark.parametrize("spoken", ["-", "", "1", "0,1", f"{SPOKEN}.0", "x" * 100])
def test_another_version_of_the_protocol_is_426_with_a_sentence(scene: Scene, spoken: str) -> None:
    for caller, path in ((scene.operator, "/v1/jobs"), (scene.league.nobody(), "/v1/jobs")):
        got = caller.call("GET", path, headers={"Hansa-Protocol": spoken})
        assert got.status == 426 and "install the same version of hansa on both sides" in got.error


@pytest.mark.parametrize("spoken", [SPOKEN, f"{SPOKEN},9", f"0, {SPOKEN}"])
def test_one_common_version_is_enough(scene: Scene, spoken: str) -> None:
    assert scene.operator.call("GET", "/v1/jobs", headers={"Hansa-Protocol": spoken}).status == 200


@pytest.mark.parametrize(
    "path",
    [
        f"{ASK.format(**FILLED)}/message".replace("/0/round", "/x/round"),
        f"{ASK.format(**FILLED)}/message".replace("/0/round", f"/{'9' * 400}/round"),
        f"/v1/work?instance={'1' * 65}",
        "/v1/work",
        "/v1/work?instance=../..",
        f"{ASK.format(**FILLED)}/parts/..%2f..%2fca.key",
        f"{ASK.format(**FILLED)}/parts/{'AB' * 32}",
    ],
)
def test_a_path_or_query_that_is_none_gets_a_sentence(scene: Scene, path: str) -> None:
    got = scene.parties["ann"].call("GET", path)
    assert got.status in (400, 404) and got.error


@pytest.mark.parametrize("number", ["", "-1", "x", "9" * 20, "9" * 5000, "1e3"])
def test_a_number_that_is_none_gets_a_sentence(scene: Scene, number: str) -> None:
    path = f"{Asked().path}/parts/{'ab' * 32}?at={number}"
    got = scene.parties["ann"].call("PUT", path, b"x", Asked().about)
    assert got.status == 400 and "at which byte" in got.error
    for path in ("/v1/log", "/v1/jobs/none"):
        got = scene.operator.call("GET", f"{path}?after={number}")
        assert got.status in (400, 404) and got.error


def test_a_body_over_the_limit_is_413_before_it_is_read(scene: Scene) -> None:
    ann = scene.parties["ann"]
    size = 2**20 + 1
    got = ann.call("POST", Asked().path + "/reply", b"x" * size, Asked().about)
    assert got.status == 413 and str(2**20) in got.error
    ann.close()
    size = 4 * 2**20 + 1
    got = ann.call("PUT", f"{Asked().path}/parts/{'ab' * 32}?at=0", b"x" * size, Asked().about)
    assert got.status == 413
    ann.close()
    ann.connection.putrequest("POST", Asked().path + "/reply")  # a length that is only claimed
    for name, value in {"Hansa-Protocol": SPOKEN, "Content-Length": str(2**40)}.items():
        ann.connection.putheader(name, value)
    ann.connection.endheaders()
    with ann.connection.getresponse() as response:
        assert response.status == 413
    ann.close()


def test_a_body_in_chunks_of_no_stated_length_is_not_read(scene: Scene) -> None:
    ann = scene.parties["ann"]
    signed = signing.sign(ann.key, "POST", Asked().path + "/reply", b"", Asked().about)  # type: ignore[arg-type]
    pieces = (b"x" * 2**16 for _ in range(17))
    ann.connection.request("POST", Asked().path + "/reply", pieces, {"Hansa-Protocol": SPOKEN, **signed},
                           encode_chunked=True)  # fmt: skip
    with ann.connection.getresponse() as response:
        assert response.status == 411
    ann.close()
