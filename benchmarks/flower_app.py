"""The same federated averaging under Flower's simulation engine; runs in Flower's own environment.

python flower_app.py FOLDER CLIENTS ROUNDS CORES prints the seconds of each round as the last line.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from opacus_client import cnn, train

folder, clients, rounds, cores = sys.argv[1], *map(int, sys.argv[2:5])
client_app, server_app = ClientApp(), ServerApp()
finished: list[float] = []
failures: list[str] = []


@client_app.train()
def local(message: Message, context: Context) -> Message:
    weights = message.content["arrays"].to_numpy_ndarrays()
    trained = train(folder, int(context.node_config["partition-id"]), weights)
    metrics = MetricRecord({"num-examples": 1})  # clients of equal size
    return Message(RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    def after_round(number: int, arrays: ArrayRecord) -> None:
        finished.append(time.perf_counter())

    start = ArrayRecord([p.detach().numpy() for p in cnn().parameters()])
    strategy = FedAvg(
        fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients,
        train_metrics_aggr_fn=lambda replies, key: MetricRecord({"clients": len(replies)}),
    )  # fmt: skip
    result = strategy.start(grid, start, num_rounds=rounds, evaluate_fn=after_round)
    for number in range(1, rounds + 1):  # Flower goes on without clients that failed: that would be quick indeed
        answered = result.train_metrics_clientapp.get(number, {}).get("clients", 0)
        if answered != clients:
            failures.append(f"round {number}: {answered} of {clients} clients answered")


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": cores}}
    run_simulation(server_app, client_app, num_supernodes=clients, backend_config=resources)
    if failures:
        sys.exit("; ".join(failures))
    # after_round is called before the first round as well
    seconds = [after - before for before, after in pairwise(finished)]
    sys.stdout.write("\n" + json.dumps(seconds) + "\n")
