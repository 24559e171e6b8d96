"""Flower's SecAgg+: its mod at the parties and its workflow at the server, as they are, in one process.

    secure_sum.py PARTIES VALUES DROPOUTS...

One party masks a whole vector and is timed; the others mask one value, and send noise of the right length in its place.
Dropouts leave after they shared their secrets. Secrets are split and put together by a library that takes up to five
seconds for each at these sizes: the other parties all share the secrets of one of them, and the server puts one of each
kind together; for the others the same time is reckoned.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.common import (
    ArrayRecord,
    Code,
    ConfigRecord,
    FitIns,
    FitRes,
    Message,
    RecordDict,
    Status,
    ndarrays_to_parameters,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat as compat
from flwr.server import SimpleClientManager
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow, WorkflowState
from flwr.supercore.task_identity import TaskIdentity

# Their packages hide these modules behind names of their own.
mod = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
server = importlib.import_module("flwr.server.workflow.secure_aggregation.secaggplus_workflow")


class Shamir:
    """Flower's functions, which do the same work once; `reckoned` are the seconds of what was not done again."""

    def __init__(self) -> None:
        self.split, self.combine = mod.create_shares, server.combine_shares
        self.known: dict[tuple[str, int, int], tuple[float, object]] = {}
        self.reckoned, self.alone = 0.0, True
        mod.create_shares, server.combine_shares = self.create_shares, self.combine_shares

    def create_shares(self, secret: bytes, threshold: int, num: int) -> list[bytes]:
        if self.alone:  # the party that is timed
            return self.split(secret, threshold, num)
        return self._once(("split", len(secret), num), lambda: self.split(secret, threshold, num))

    def combine_shares(self, shares: list[bytes]) -> bytes:
        return self._once(("combine", len(shares[0]), len(shares)), lambda: self.combine(shares))

    def _once(self, name: tuple[str, int, int], work: Callable[[], Any]) -> Any:
        if name in self.known:
            self.reckoned += self.known[name][0] if name[0] == "combine" else 0.0
        else:
            began = time.process_time()
            made = work()
            self.known[name] = (time.process_time() - began, made)
        return self.known[name][1]


class Sum:
    """One sum. The workflow's own stages talk to this as to a grid."""

    def __init__(self, parties: int, values: int, dropouts: float, shamir: Shamir) -> None:
        self.parties, self.values = parties, values
        self.gone = set(range(parties - round(dropouts * parties) + 1, parties + 1))
        self.states = {node: mod.SecAggPlusState() for node in range(1, parties + 1)}
        self.update = np.random.default_rng(0).normal(0, 0.1, values).astype(np.float32)
        self.party = self.waited = 0.0
        self.up, self.shamir = 0, shamir
        shamir.reckoned = 0.0

    def send_and_receive(self, messages: list[Message], timeout: float | None = None) -> list[Message]:
        began = time.process_time()
        out, noise = [], None
        for message in sorted(messages, key=lambda m: m.metadata.dst_node_id):
            node = message.metadata.dst_node_id
            configs = ConfigRecord(dict(message.content.config_records[RECORD_KEY_CONFIGS]))
            stage = configs.pop(Key.STAGE)
            if stage == Stage.COLLECT_MASKED_VECTORS and node in self.gone:
                continue
            state = self.states[node]
            self.shamir.alone = node == 1
            clock = time.process_time()
            if stage == Stage.SETUP:
                state.nid = node
                reply = mod._setup(state, configs)
            elif stage == Stage.SHARE_KEYS:
                reply = mod._share_keys(state, configs)
            elif stage == Stage.COLLECT_MASKED_VECTORS:
                values = self.update if node == 1 else self.update[:1]
                reply = mod._collect_masked_vectors(state, configs, 100, ndarrays_to_parameters([values]))
            else:
                reply = mod._unmask(state, configs)
            if node == 1:
                self.party += time.process_time() - clock
                sent = [value if isinstance(value, list) else [value] for value in reply.values()]
                self.up += sum(len(part) for parts in sent for part in parts if isinstance(part, bytes))
                noise = reply
            if stage == Stage.COLLECT_MASKED_VECTORS and node != 1:
                reply = noise
            fit = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([]), 100, {})
            content = compat.fitres_to_recorddict(fit, keep_input=False)
            content.config_records[RECORD_KEY_CONFIGS] = ConfigRecord(dict(reply), False)
            out.append(Answer(node, content))
        self.waited += time.process_time() - began
        return out

    def run(self) -> dict[str, float]:
        fit = FitIns(ndarrays_to_parameters([]), {})
        strategy = SimpleNamespace(
            configure_fit=lambda *_: [(SimpleNamespace(node_id=node), fit) for node in self.states],
            aggregate_fit=lambda round, results, failures: (None, {}),
        )
        state = RecordDict({MAIN_CONFIGS_RECORD: ConfigRecord({WorkflowKey.CURRENT_ROUND: 1}),
                            MAIN_PARAMS_RECORD: ArrayRecord()})  # fmt: skip
        context = SimpleNamespace(state=state, strategy=strategy, client_manager=SimpleClientManager())
        flow, here = SecAggPlusWorkflow(1.0, 0.67), WorkflowState()
        began = time.process_time()
        for stage in (flow.setup_stage, flow.share_keys_stage, flow.collect_masked_vectors_stage, flow.unmask_stage):
            assert stage(self, context, here), stage
        seconds = time.process_time() - began - self.waited + self.shamir.reckoned
        return {"party": self.party, "aggregator": seconds, "up": self.up}


@dataclass
class Answer:
    """A message from a party, as far as the workflow looks at it."""

    node: int
    content: RecordDict

    @property
    def metadata(self) -> SimpleNamespace:
        return SimpleNamespace(src_node_id=self.node)

    def has_error(self) -> bool:
        return False


def main() -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    parties, values, *dropouts = sys.argv[1:]
    shamir = Shamir()
    rows = [{"who": f"Flower {metadata.version('flwr')}, SecAgg+", "dropouts": float(share),
             **Sum(int(parties), int(values), float(share), shamir).run()} for share in dropouts]  # fmt: skip
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
