"""The worker of a party: answers asks from the party's data as its policy allows. It opens no connection."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import hansa
from hansa.core.answering import answer
from hansa.core.ask import op_of
from hansa.core.data_op import DataOp
from hansa.core.delivery import Deliver
from hansa.core.entries import sizes_of
from hansa.core.op import Memory, Op, Party, Payload, Reply
from hansa.core.post import Post
from hansa.core.session_op import SessionOp
from hansa.core.wrapper import unwrap
from hansa.local.clipping import keeps_state
from hansa.local.solver import LocalSolver
from hansa.net.audit.evidence import payload_model_digest
from hansa.net.party import own_models
from hansa.net.party.after_reading import AfterReading, AgentLink
from hansa.net.party.approval_gate import waits
from hansa.net.party.approvals import Approvals
from hansa.net.party.asks import log_fields
from hansa.net.party.data_statement import told
from hansa.net.party.data_watch import LossWatch
from hansa.net.party.evaluations import check_rows
from hansa.net.party.gateway import OwnerGateway
from hansa.net.party.manifest_checks import ApprovedVault, check_number, refuses_ask
from hansa.net.party.model_watch import ModelLoss, ModelWatch, SeenModels, training_loss
from hansa.net.party.op_parts import parts
from hansa.net.party.preparations import admit, apply
from hansa.net.party.public_store import PublicStore
from hansa.net.party.store import PartyMemory, PartyStore
from hansa.net.party.vault import PartyVault, load_secret
from hansa.net.transport.manifest import Manifest, decode_manifest
from hansa.net.transport.wire import Work
from hansa.plumbing import codec, disk
from hansa.plumbing.crash_points import reach
from hansa.plumbing.errors import DataError, HansaError, NotAdmitted, PartyError
from hansa.plumbing.stopping import Halted
from hansa.privacy import spent
from hansa.transforms.downlink import opened_payload, transform_of

log = logging.getLogger("hansa.net")
SENTENCE = 1800  # characters: the longest reason for a refusal
ASK = {"op": dict, "payload": dict, "round": int}
TASK = {"task": dict, "preparations": list}
Changed = Callable[[Work], bool]  # whether the party's samples are others than in the last round
Prepared = Callable[[int, dict[str, Any], str], Party]  # (party's number, task, device) -> the party


@dataclass(frozen=True)
class AdmittedAsk:
    """An ask that the party may answer, by what the request says, what the owner declared and what is public.

    `settings` is the task with this party's model, `manifest` the one that the owner approved, if approval is needed.
    """

    op: Op
    message: dict[str, Any]
    settings: dict[str, Any]
    preparations: list[Any]
    manifest: Manifest | None


@dataclass(frozen=True)
class BookedAsk:
    """An ask whose party is built, and whose readings the vault will record under its name `ask`."""

    op: Op
    ask: str
    party: Party  # with the samples themselves, which is never given to the op
    data: OwnerGateway  # to the samples, which the op gets
    here: Party  # the party with `data`
    payload: Payload
    memory: Memory
    settings: dict[str, Any]
    rule: AfterReading


class Worker:
    """Runs asks at the party, in one thread: policy, data, training, memory. It opens no connection.

    `data` returns the digest of the party's samples, by which its query budget knows the data set. In a worker process,
    `agent` signs for it, and learns when an ask begins to read. `changed` looks for new samples at the
    beginning of a round. The query budget counts them with those with which the party started.
    """

    def __init__(self, store: PartyStore, prepare: Prepared, data: Callable[[], str] = str,
                 agent: AgentLink | None = None, changed: Changed = lambda work: False) -> None:  # fmt: skip
        self._changed, self._losses = changed, LossWatch(store.folder)
        self._store, self._policy, self._prepare, self._data = store, store.policy, prepare, functools.cache(data)
        self._memory = PartyMemory(store.folder / "memory", store.policy.limits.jobs)
        self._folder = store.folder
        self._agent, signer = agent, None if agent is None else agent.sign
        self.vault = PartyVault(store.folder, spent, store.policy.privacy.budget, store.policy.peers, signer)
        self.vault.begin_marks()
        self._watch = ModelWatch(self._memory)
        self._approvals = Approvals(store.folder)
        self._public = PublicStore(store.folder / "public", store.policy.limits.public)
        self._ready: tuple[tuple[str, str, str | None], Party, str] | None = None
        self._applied: list[dict[str, Any]] = []  # the preparations of that party's data, with all their numbers
        self.post: Post | None = None  # how an ask exchanges messages with other parties

    @property
    def seconds(self) -> float:
        """The most seconds that an ask may take."""
        return self._policy.limits.seconds

    def declined(self, job: str, ask: str) -> None:
        """Record that the last worker process ended after it had read, which reveals a bit."""
        self.vault.declined(job, ask)

    def take_policy(self) -> None:
        """Begin to use a policy that was read while the party ran. Called between two asks."""
        policy = self._store.next_policy
        if policy is None:
            return
        self._store.policy, self._store.next_policy = policy, None
        self._policy, self._ready = policy, None  # the party is made again, under the new limits
        self._memory.jobs = policy.limits.jobs
        self.vault.limit_to(policy.privacy.budget, policy.peers)

    def answer(self, work: Work, message: dict[str, Any], task: dict[str, Any]) -> tuple[Reply | str, bool]:
        """Return the reply to an ask, or the reason for a refusal, and whether memory was staged.

        Three phases: admit the ask by what it says, record what is going to be read, and reply. Once something was
        read, the only refusal is the constant one (`after_reading`).
        """
        try:
            with self._policy.only_listed():
                admitted = self._admit(work, message, task)
                if isinstance(admitted.op, DataOp):  # it only becomes part of the task, which applies it to the data
                    return Reply({}), False
                return self._reply(work, self._book(work, admitted))
        except Halted as halted:
            if halted.reason is None:
                raise
            return halted.reason, False
        except HansaError as error:  # its message may quote a tensor of the ask
            return " ".join(str(error).split())[:SENTENCE], False
        except Exception as error:  # messages of other code may quote the data, so they are only logged
            if isinstance(error, OSError) and error.errno in disk.FULL:
                raise  # the party's disk is full, perhaps only for now: it will be asked again
            return self.failed(work, error), False

    def failed(self, work: Work, error: Exception) -> str:
        """Log an unexpected error; return the reason to send, without the error's message."""
        log.error("the ask failed", extra=log_fields(work), exc_info=error)
        exhausted = self._policy.limits.exhausted(error)
        return exhausted or f"the ask failed at the party ({type(error).__name__}); see the party's log"

    def _admit(self, work: Work, message: dict[str, Any], task: dict[str, Any]) -> AdmittedAsk:
        """Check an ask by the request, the owner's settings and public facts. Nothing here touches samples."""
        if not _has_fields(message, ASK) or not _has_fields(task, TASK):
            raise DataError("malformed ask: expected op, payload and round, and a task with its preparations")
        if message["round"] != work.round:
            raise DataError(f"malformed ask: it is of round {work.round}, and its message of another round")
        op, policy = op_of(message["op"], where="ask"), self._policy
        settings = policy.choose(task["task"], work.party)
        _admit_if(policy.refuses_op(op) or policy.refuses_model(settings.get("model")))
        _admit_if(policy.refuses_augment(settings.get("augment")) or policy.refuses_architecture(message["payload"]))
        if "packed" in message:
            packed = transform_of(message["packed"])
            _admit_if(policy.refuses_op(packed) or policy.ranges.refuses(packed, 0, {}))
        _admit_if(policy.refuses_several(op, message, settings))
        manifest = self._approved(work) if policy.approve.needed else None
        _admit_if(policy.refuses_weights(op, message["payload"]))
        if manifest is not None:
            name = self._store.registration()["party"]
            _admit_if(refuses_ask(manifest, name, work, op, message, settings, task["preparations"]))
        if isinstance(op, DataOp):
            _admit_if(policy.refuses_payload(op, message["payload"], {}))
        else:
            if (settings or task["preparations"]) and any(part.name == "describe" for part in parts(op)):
                # A preparation chosen by the aggregator could be a query: whether values overflow, for example.
                raise NotAdmitted("a party describes its data only before there is a task or a preparation")
            if work.shown and payload_model_digest(message["payload"]) != work.model:
                raise NotAdmitted("the message does not contain the model at the start of its round, as the ask says")
        return AdmittedAsk(op, message, settings, task["preparations"], manifest)

    def _book(self, work: Work, admitted: AdmittedAsk) -> BookedAsk:
        """Build the party, and record on disk what the ask fixes and what it is going to read."""
        op, message, settings = admitted.op, admitted.message, admitted.settings
        self._fix(work.job, work.party, settings)
        if self._changed(work):
            self._ready = None  # the party is made again, of the new samples
        before, preparations = unwrap(op)[1].continues, admitted.preparations
        earlier: Memory = {}
        if before is not None:
            earlier, preparations = own_models.continued(self._memory, before)
        party = self._built(work, settings, preparations, before)
        memory = self._memory.recall(work.job, work.tip, {work.base, work.pending})
        if memory is None:
            log.warning("the party's memory is lost; starting with empty memory", extra=log_fields(work))
            memory = {}
        memory = earlier | memory
        spec = party.objective.spec
        payload = self._policy.payload(op, opened_payload(message, spec.dim, spec.dtype))
        _admit_if(self._policy.refuses_payload(op, payload, sizes_of(spec, party.data, settings)))
        data = OwnerGateway(party.data, self._policy, self.vault, work.job, op, payload, self._data())
        data.check(held_out=party.data.tests is None and bool(settings.get("party_test")))
        if self._policy.privacy.private and op.budget is not None:
            _check_stateless(party)
        _admit_if(self._policy.refuses_memory(op, memory))
        _admit_if(op.refuses_request(message, memory, work.task.digest))
        inputs = self._input_digest(work, memory)  # after the checks: the memory may be as large as the model
        secret = hashlib.blake2b(inputs.encode(), digest_size=32, key=load_secret(self._folder)).digest()
        ask = hashlib.sha256(secret).hexdigest()  # another secret gives other noise, which costs budget again
        vault, min_cohort = self.vault.for_job(work.job, work.task.digest), self._policy.min_cohort
        if admitted.manifest is not None:
            check_number(admitted.manifest, self.vault, op, work)
            vault = ApprovedVault(self.vault, work.job, work.task.digest, admitted.manifest)
            min_cohort = max(min_cohort, admitted.manifest.min_cohort)
        rule = self._rule(work, ask)
        data.open(ask, rule)
        here = replace(party, data=data, round=message["round"], secret=secret, vault=vault, min_cohort=min_cohort,
                       min_rows=self._policy.min_rows, min_drawn=self._policy.fewest_drawn,
                       rows_secret=self._rows_secret(work.job), min_matches=self._policy.fewest_matches,
                       post=self.post)  # fmt: skip
        return BookedAsk(op, ask, party, data, here, payload, memory, settings, rule)

    def _rows_secret(self, job: str) -> bytes:
        """The secret by which asks of a job draw samples; empty without a privacy floor."""
        if not self._policy.privacy.exists:
            return b""
        return hashlib.blake2b(f"rows of {job}".encode(), digest_size=32, key=load_secret(self._folder)).digest()

    def _reply(self, work: Work, booked: BookedAsk) -> tuple[Reply, bool]:
        """Run the op. Once it has read, its reply or the constant refusal is all that leaves."""
        op, party, data, payload, memory = booked.op, booked.party, booked.data, booked.payload, booked.memory

        def run() -> tuple[Reply, Memory]:
            device = party.objective.device
            on_device = _to_device(payload, device), _to_device(memory, device)
            try:
                check_rows(op, booked.here, *on_device)  # it runs the model on samples, which may fail
                result = op.run(booked.here, *on_device)
            finally:
                data.close()
            reach("party.trained")
            return result

        with booked.rule as rule:
            trains = any(isinstance(part, (LocalSolver, SessionOp)) and not part.evaluates for part in parts(op))
            seen = self._check_model(work, booked) if trains else None
            if memory and not unwrap(op)[1].serves:  # made from samples: what the op does may depend on them
                rule.begin()
            if isinstance(op, Deliver):
                own_models.keep(self._memory, work.job, party, op.used_by, payload, memory, booked.settings,
                                self._applied)  # fmt: skip
            answered = answer(
                op, run, lambda: data.spent, lambda staged: self._memory.stage(work.job, work.ask, staged)
            )
            for _ in codec.pieces(answered[0].tree()):  # a reply that cannot be sent is a failure like others
                pass
            if seen is not None:
                self._watch.remember(work.job, seen)
            self._losses.hear(work, op, answered[0])
        return answered

    def _fix(self, job: str, party: int, settings: Mapping[str, Any]) -> None:
        """Record the choices of a task that are fixed for its job; a PartyError if they have changed."""
        if not settings:
            return
        where = f" in {self._store.registration()['federation']}" if self._store.enrolled else ""
        self.vault.fix(job, f"task.party_test and task.seed{where}", _split_settings(settings))
        if settings["party_test"]:  # each number holds other samples out
            self.vault.fix(job, f"numbers of this party{where}", str(party))
        if "table" in settings:  # another table for every ask would be a question: does a column have this value?
            self.vault.fix(job, f"the columns of the job's table{where}", codec.digest(settings["table"]))
        if "chosen" in settings:
            self.vault.fix(job, f"models for this party{where}", repr(settings["chosen"]))

    def _rule(self, work: Work, ask: str) -> AfterReading:
        """The rule about refusals after a reading, for an ask of this name."""
        return AfterReading(self.vault, self._policy.privacy, self._agent, work, ask)

    def _check_model(self, work: Work, booked: BookedAsk) -> SeenModels:
        """Raise a PartyError for a model that the owner does not let the party train (`[broadcast]`)."""
        limits, payload = self._policy.broadcast, booked.payload

        def loss() -> float:
            if not self.vault.may_refuse(work.job, booked.ask, limits.refusals):
                return math.inf
            samples = booked.party.data
            data = OwnerGateway(samples, self._policy, self.vault, work.job, ModelLoss(), payload, self._data())
            data.for_itself()
            data.open(booked.ask, booked.rule)
            try:
                here = replace(booked.here, data=data)
                return training_loss(here, _to_device(payload, here.objective.device))
            finally:
                data.close()

        try:
            return self._watch.check(limits, work.job, work.round, booked.op, payload, loss)
        except PartyError as error:
            log.warning("model refused: %s", error, extra=log_fields(work))
            raise

    def _approved(self, work: Work) -> Manifest:
        """The manifest that was approved, if it is that of the ask; else a PartyError."""
        last = self._approvals.last_decided(work.job)
        if last is None or not last[0].approved or work.manifest is None or last[0].manifest != work.manifest.digest:
            raise PartyError(waits(work.job))
        return decode_manifest(last[1])

    def _input_digest(self, work: Work, memory: Memory) -> str:
        """A hash of everything that a reply depends on.

        The same noise must never cover two different replies. So the party's random draws for an ask depend on this
        hash: of the message, the data, the policy, and the versions, since another version may round differently.
        """
        assert self._ready is not None
        inputs = {"job": work.job, "party": work.party, "message": work.message.digest, "task": work.task.digest,
                 "data": self._ready[2], "memory": memory, "own": self._policy.own,
                 "device": self._policy.device, "versions": [hansa.__version__, torch.__version__]}  # fmt: skip
        return codec.digest(inputs)

    def _built(self, work: Work, task: dict[str, Any], preparations: list[Any], before: str | None) -> Party:
        """The party of a task. Building it reads samples, so a failure is one after a reading.

        A `NotAdmitted` is decided by declarations. A failure counts once per task, whatever asks follow.
        """
        inputs = {"job": work.job, "task": work.task.digest, "before": before, "data": self._data()}
        with self._rule(work, codec.digest(inputs)) as rule:
            if self._ready is None or self._ready[0] != (work.job, work.task.digest, before):
                rule.begin()
            return self._party(work, task, preparations, before)

    def _party(self, work: Work, task: dict[str, Any], preparations: list[Any], before: str | None) -> Party:
        """The party with prepared data and model, cached until the task changes.

        `before` is the job whose preparations they are, if it is another one.
        """
        key = (work.job, work.task.digest, before)
        if self._ready is None or self._ready[0] != key:
            if "public" in task:
                with told():
                    task = {**task, "public": self._public.read(task["public"]["digest"])}
            party = self._prepare(work.party, self._policy.split(task), self._policy.device)
            admit(preparations, party, task, self._policy if before is None else None)  # else: it was allowed then
            self._applied = apply(preparations, party)
            self._ready = (key, party, party.data.digest())
        return self._ready[1]


def _admit_if(refused: str | None) -> None:
    """Raise the reason for a refusal, if there is one."""
    if refused is not None:
        raise NotAdmitted(refused)


def _check_stateless(party: Party) -> None:
    """Raise a NotAdmitted for a model that keeps state: a sample would change what others add to a clipped sum."""
    if party.objective.module is None or not party.n or not party.data.labelled:
        return
    x, y = party.rows("train")  # for their shapes and types alone
    if keeps_state(party.objective, x[:1], y):
        raise NotAdmitted(
            "its policy requires differential privacy, and the model keeps state between its calls, or fails on "
            "generated samples: noise for one sample would not cover what the sample changes"
        )


def _has_fields(tree: dict[str, Any], kinds: Mapping[str, type]) -> bool:
    return all(isinstance(tree.get(name), kind) for name, kind in kinds.items())


def _split_settings(task: Mapping[str, Any]) -> str:
    """The task's split of the party's samples, as text; a DataError if it is invalid."""
    share, seed = task.get("party_test"), task.get("seed")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
        raise DataError(f"task.party_test must be at least 0 and less than 1, got {share!r:.100}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise DataError(f"task.seed must be a whole number, got {seed!r:.100}")
    return f"{float(share)!r} and {seed}"


def _to_device(tree: Any, device: torch.device) -> Any:
    """Copy a tree with its tensors on a device."""
    if device.type == "cpu":
        return tree
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {name: _to_device(value, device) for name, value in tree.items()}
    return [_to_device(value, device) for value in tree] if isinstance(tree, list) else tree
