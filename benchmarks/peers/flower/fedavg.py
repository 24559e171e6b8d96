"""Flower: its own FedAvg over its simulation runtime, two Ray actors of one CPU, the lean trainer in its client.

.envs/flower/bin/python peers/flower/fedavg.py [--model 2nn|cnn] [--rounds 20]
"""

from __future__ import annotations

import logging
import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

import lean
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import COHORT, PARTIES, SAMPLES, Laps, arguments, order

server, client = ServerApp(), ClientApp()
laps = Laps()


@client.train()
def train(message: Message, context: Context) -> Message:
    index = int(context.node_config["partition-id"])
    config = message.content["config"]
    # The model travels as one array: fewer pieces to pack.
    start = message.content["arrays"]["flat"].numpy()
    trained = lean.train(str(config["model"]), start, index, order(int(config["server-round"]), index))
    content = {"arrays": ArrayRecord({"flat": Array(trained)}), "metrics": MetricRecord({"num-examples": SAMPLES})}
    return Message(RecordDict(content), reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    strategy = FedAvg(
        fraction_train=COHORT / PARTIES, fraction_evaluate=0.0, min_train_nodes=COHORT, min_available_nodes=PARTIES
    )
    first = ArrayRecord({"flat": Array(lean.trainer(given.model).flat().numpy())})
    strategy.start(
        grid, first, num_rounds=given.rounds + 1, train_config=ConfigRecord({"model": given.model}),
        evaluate_fn=lambda round_, _: laps() if round_ else None,
    )  # fmt: skip


if __name__ == "__main__":
    given = arguments(__doc__)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(
        server, client, PARTIES,
        backend_config={"client_resources": {"num_cpus": 1.0}, "init_args": {"num_cpus": 2, "log_to_driver": False}},
    )  # fmt: skip
    laps.report("flwr", "ray", "torch")
