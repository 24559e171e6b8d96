"""Worlds with a relay: some parties are behind it, and it dies and loses messages like any other process."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import sqlite3
from pathlib import Path
from typing import Any
from unittest import mock

from clockwork import Process
from lives import Direct, News, SimulatedLedger, SimulatedRunner, connect
from promises import Promises
from wires import Session, SimulatedClient
from world import NAMES, Present, Weather, World, _der, make_home, template

from hansa.net.aggregator.blobs import Blobs
from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.aggregator.ledger import begin
from hansa.net.aggregator.queue import TaskQueue
from hansa.net.aggregator.registry import Registry
from hansa.net.aggregator.server import Server
from hansa.net.party.store import PartyStore
from hansa.net.relay import relay
from hansa.net.relay.relay import Relay
from hansa.net.transport import keys
from hansa.net.transport.admission import Admission
from hansa.net.transport.limits import Limits
from hansa.net.transport.prometheus import Metrics

HUB = "hub"


@functools.lru_cache(maxsize=1)
def relayed_template() -> tuple[Path, FederationFolder, sqlite3.Connection, FederationFolder, sqlite3.Connection]:
    """The root's template with an enrolled relay, and the folder and record of the relay, with enrolled parties."""
    root, federation, origin = template()
    above = connect()
    origin.backup(above)
    ledger = Direct(above, federation.notary())
    upper = dataclasses.replace(federation, relays={HUB: NAMES[:1]})
    registry = Registry(upper, ledger)
    token, invited = registry.invite(HUB)
    ledger.now(invited)
    make_home(root / "hub-home", HUB, federation, ledger, registry, token.secret)
    hub = init(root / "hub", "hub", NAMES, ["localhost"], 9443)
    below = connect()
    inner = Direct(below, hub.notary())
    inner.now(begin(hub.notary()))
    registry = Registry(hub, inner)
    for name in NAMES:
        made = hub.token(name)
        assert made is not None
        make_home(root / "hub-homes" / name, name, hub, inner, registry, made.secret)
    return root, federation, above, hub, below


class RelayLife:
    """One life of the relay."""

    def __init__(self, world: RelayedWorld) -> None:
        self.world, weather, loop = world, world.weather, world.loop
        skew = loop.chance.uniform(-weather.skew, weather.skew)
        self.process = Process(loop, HUB, skew, weather.fragile if world.stormy else 0.0)
        self.process.on_death.append(self._died)
        self.process.errors = world.errors
        self.store: PartyStore | None = None
        self.process.spawn(self._live())

    def _died(self) -> None:
        if self.store is not None:
            self.store.close()
        self.world.relay_died(self)

    async def _live(self) -> None:
        world = self.world
        ledger = SimulatedLedger(world.hub_db, world.hub_notary, self.process)
        state = world.folder / HUB / "state"
        blobs = Blobs(state, min_free=0)
        queue = TaskQueue(world.weather.absent_after, world.weather.lease)
        queue.changed = News()  # type: ignore[assignment]
        registry = Registry(world.hub, ledger)
        runner = SimulatedRunner(state, registry, ledger, blobs, queue)
        runner.process = self.process

        def note(event: str, **fields: Any) -> None:
            ledger.write(lambda db: db.log(event, **fields))

        limits = Limits(party_rate=1e9, party_burst=10**9, party_requests=10**6)
        admission = Admission(limits, Metrics(), note, lambda: queue.known)
        self.app = Server(registry, ledger, blobs, queue, runner, admission).app()
        self.app.freeze()
        runner.resume()
        world.relay = self
        self.store = PartyStore(world.folder / HUB / "home")
        client = SimulatedClient("https://localhost:8443", None, world.keys[HUB])  # type: ignore[arg-type]
        client._session = Session(world, HUB, world.certificates[HUB])  # type: ignore[assignment]
        await Relay(state, registry, ledger, blobs, queue, self.store, client).run()


class RelayedWorld(World):
    """A world in which the first parties, at least one, are behind a relay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.relay: RelayLife | None = None
        root, federation, above, hub, below = relayed_template()
        self.behind = self.names[: self.loop.chance.randint(1, self.weather.parties)]
        self.db.close()
        self.db, self.hub_db = connect(self._database()), connect()
        above.backup(self.db)
        below.backup(self.hub_db)
        self.db.execute("DELETE FROM parties WHERE number >= ?", (self.weather.parties,))
        self.hub_db.execute("DELETE FROM parties WHERE number >= ?", (len(self.behind),))
        self.federation = FederationFolder("world", self.names, federation.url, relays={HUB: self.behind},
                                           folder=federation.folder)  # fmt: skip
        self.hub = FederationFolder("hub", self.behind, hub.url, folder=hub.folder)
        self.hub_notary = self.hub.notary()
        shutil.copytree(root / "hub-home", self.folder / HUB / "home")
        for name in self.behind:
            shutil.rmtree(self.folder / name / "home")
            shutil.copytree(root / "hub-homes" / name, self.folder / name / "home")
        for name in (HUB, *self.behind):
            home = self.folder / name / "home"
            self.keys[name] = keys.load_key((home / "key.pem").read_bytes())
            self.certificates[name] = _der((home / "cert.pem").read_bytes())
        (self.folder / HUB / "state").mkdir()
        self.journals = {name: Present(self.folder / name) for name in ("aggregator", HUB, *self.names)}

    def _forecast(self) -> Weather:
        weather = super()._forecast()
        if weather.algorithm == "tally" and self.loop.chance.random() < 0.6:
            weather.run.update(sums="exact", max_weight=1000)
        return weather

    def session(self, name: str) -> Session:
        server: Any = (lambda: self.relay) if name in self.behind else None
        return Session(self, name, self.certificates[name], server)

    def relay_died(self, life: RelayLife) -> None:
        """The relay has died, and is restarted after a while."""
        self.deaths += 1
        self.note("died", HUB)
        if self.loop.chance.random() < self.weather.power:
            self._lose_power(HUB)
        self.relay = None
        self.loop.call_later(self.loop.chance.expovariate(1 / 10.0), lambda: self.ended is None and RelayLife(self))

    def _lives(self) -> list[Any]:
        return [*super()._lives(), self.relay]

    def _victim(self) -> Any:
        return self.relay if self.loop.chance.random() < 0.4 else super()._victim()

    async def _history(self) -> None:
        RelayLife(self)
        with mock.patch.object(relay, "TICK", 5.0), mock.patch.object(relay, "LOOK", 5.0):
            await super()._history()

    def _check(self) -> None:
        RelayedPromises(self).check()


class RelayedPromises(Promises):
    """The promises, where a party's receipts may be those of its relay."""

    world: RelayedWorld

    def _stored(self) -> dict[tuple[Any, ...], sqlite3.Row]:
        world = self.world
        own = {key: row for key, row in super()._stored().items() if key[-1] not in world.behind}
        rows = world.hub_db.execute("SELECT * FROM replies").fetchall()
        return own | {(r["job"], r["round"], r["phase"], r["number"], world.behind[r["party"]]): r for r in rows}

    def _check_audit(self) -> None:
        world = self.world
        homes = {name: world.folder / name / "home" / "receipts" for name in (HUB, *world.names)}
        kept = {name: sorted(home.glob("*.jsonl")) for name, home in homes.items()}
        inner = [path for name in world.behind for path in kept[name]]
        outer = [path for name, paths in kept.items() if name not in world.behind for path in paths]
        self._verify(Direct(self.db, world.notary), outer)
        self._verify(Direct(world.hub_db, world.hub_notary), inner)
