"""The ClientApp: one step of SGD. It imports no PyTorch, for Flower starts a process for every message."""

from __future__ import annotations

import onestep
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    start = message.content["arrays"]["flat"].numpy()
    trained = onestep.train(start, int(context.node_config["party"]))
    content = {
        "arrays": ArrayRecord({"flat": Array(trained)}), "metrics": MetricRecord({"num-examples": onestep.BATCH})
    }  # fmt: skip
    return Message(RecordDict(content), reply_to=message)
