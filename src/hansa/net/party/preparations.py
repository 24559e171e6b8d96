"""Preparations of a party's data, which a job's task names: tried on a made-up row, then applied to the samples.

The made-up row has the public shapes and types of the party's rows. A preparation that fails on it is refused with its
reason, before any sample is prepared. After that, no check depends on a value: results that are not finite are clamped
(`SampleGateway.transform`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hansa.core.ask import op_config, op_of
from hansa.core.data_op import DataOp
from hansa.core.entries import sizes_of
from hansa.core.op import Op, Party
from hansa.net.party.data_statement import told
from hansa.net.party.policy import Policy
from hansa.plumbing.errors import HansaError, NotAdmitted
from hansa.plumbing.stopping import go_on

Steps = Sequence[Mapping[str, Any]]


def admit(steps: Steps, party: Party, task: Mapping[str, Any], policy: Policy | None) -> None:
    """Raise a NotAdmitted for a preparation that the policy or the shapes of the samples do not allow.

    Without a policy, the steps are those of the party's own record.
    """
    classes = getattr(party.data.stated, "classes", None) or task.get("classes")
    made_up = replace(party, data=party.data.stand_in(classes))
    for step in steps:
        with told():
            op: Op = op_of(step["op"], where="task")
            refused = policy and (policy.refuses_preparation(op) or policy.refuses_weights(op, step["payload"]))
            if refused or not isinstance(op, DataOp):
                raise NotAdmitted(refused or f"{op.name!r} is not a preparation of data")
            sizes = sizes_of(made_up.objective.spec, made_up.data, task)
            refused = policy and policy.refuses_payload(op, step["payload"], sizes)
            if refused:
                raise NotAdmitted(refused)
        try:
            op, payload = op.resolved(made_up, step["payload"])
            op.apply(made_up, payload)
        except HansaError as error:
            raise NotAdmitted(str(error)) from None
        except Exception as error:  # of tensors that do not fit together, for example
            why = f"the payload of the preparation {op.name!r} does not fit its samples ({type(error).__name__})"
            raise NotAdmitted(why) from None


def apply(steps: Steps, party: Party) -> list[dict[str, Any]]:
    """Prepare the samples by steps that were admitted; return the steps with all numbers that they need."""
    applied: list[dict[str, Any]] = []
    for step in steps:
        go_on()
        op = op_of(step["op"], where="task")
        assert isinstance(op, DataOp)
        op, learned = op.resolved(party, step["payload"])
        op.apply(party, learned)
        applied.append({"op": op_config(op), "payload": learned})
    return applied
