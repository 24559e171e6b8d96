"""The ServerApp: Flower's own FedAvg over every node; it writes when each round ended into the file `report`."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import onestep
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class FromAll(FedAvg):
    """FedAvg that takes no round in which a node failed or is missing: such a round would be the faster."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        failed = [reply.error for reply in replies if reply.has_error()]
        if failed or len(replies) != self.min_train_nodes:
            raise RuntimeError(f"round {server_round}: {len(replies)} of {self.min_train_nodes} replies, {failed[:1]}")
        return super().aggregate_train(server_round, replies)


def pull_every(grid: Grid, seconds: float) -> None:
    """Let the strategy look for replies so often, by the grid's own verbs: `send_and_receive` sleeps 3 s in between."""

    def send_and_receive(messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        waiting, replies = set(grid.push_messages(messages)), list[Message]()
        end = time.monotonic() + (timeout or float("inf"))
        while waiting and time.monotonic() < end:
            new = list(grid.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in new}
            replies += new
            time.sleep(seconds if waiting else 0)
        return replies

    grid.send_and_receive = send_and_receive  # type: ignore[method-assign]


@app.main()
def serve(grid: Grid, context: Context) -> None:
    nodes, rounds = int(context.run_config["nodes"]), int(context.run_config["rounds"])
    if pull := float(context.run_config["pull"]):
        pull_every(grid, pull)
    report = Path(str(context.run_config["report"]))

    def note(round_: int, _: ArrayRecord) -> None:
        if round_:
            with report.open("a") as lines:
                print(time.time(), file=lines)

    try:
        FromAll(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes).start(
            grid, ArrayRecord({"flat": Array(onestep.first())}), num_rounds=rounds, evaluate_fn=note
        )
    except Exception:
        report.with_suffix(".failure").write_text(traceback.format_exc())
        raise
