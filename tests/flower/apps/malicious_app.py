"""A server that asks for what it must not get. It writes down what it got, by attack."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fairveil.engine.flower import Patience, Roll, client_app, server_app, unpacked
from fairveil.guard import Proposal
from fairveil.privacy.mechanisms import canonical
from fairveil.privacy.training import NoisyTraining
from fairveil.remote import Envelope

RUN = "0" * 32
FAIR = NoisyTraining(0.1, 10, 1.0, 2.0, 40.0)
PARAMETERS = 650


def proposed(run, *releases, delta=1e-4):
    plan = tuple((canonical(mechanism), count) for mechanism, count in releases)
    return Envelope("propose", {"run": run, "proposal": Proposal(0, "record", delta, "logistic", {}, plan).text()})


def asked(request, task="local_update", mechanism=FAIR, model=None, **more):
    model = torch.zeros(PARAMETERS) if model is None else model
    values = {"run": RUN, "request": request, "task": task, "mechanism": canonical(mechanism) if mechanism else ""}
    return Envelope("task", values | {"shared.model": model, "shared.learning_rate": 0.5} | more)


def main(grid, config):
    folder = Path(config["folder"])
    roll = Roll(grid)
    (name,) = json.loads((folder / "victim.json").read_text())
    while name not in roll.present():
        pass

    def ask(envelope):
        ((_, answer),) = roll.ask({name: envelope}, Patience(20, 1, 1))
        return answer

    def told(answer):
        values = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in answer.values.items()}
        return {"kind": answer.kind, "values": values}

    found = {}
    for attack, envelope in {
        "a fair proposal": proposed(RUN, (FAIR, 2)),
        "a proposal without noise": proposed("1" * 32, (replace(FAIR, noise_multiplier=0.0), 1)),
        "a proposal with a clip of 1e9": proposed("2" * 32, (replace(FAIR, clip_norm=1e9), 1)),
        "a proposal beyond the budget": proposed("3" * 32, (FAIR, 10**6)),
        "a proposal that grows": proposed(RUN, (FAIR, 3)),
        "a run that was never proposed": asked("round 1, ask 1", run="4" * 32),
        "a fair request": asked("round 1, ask 1"),
        "the same request again": asked("round 1, ask 1"),
        "the same request with another model": asked("round 1, ask 1", model=torch.ones(PARAMETERS)),
        "noise 0": asked("round 2, ask 1", mechanism=replace(FAIR, noise_multiplier=0.0)),
        "clip 1e9": asked("round 2, ask 1", mechanism=replace(FAIR, clip_norm=1e9)),
        "an unknown task": asked("round 2, ask 1", task="os.system"),
        "a task that is not allowed": asked("round 2, ask 1", task="confuse"),
        "no mechanism": asked("round 2, ask 1", mechanism=None),
        "a wrong shape": asked("round 2, ask 1", model=torch.zeros(PARAMETERS + 1)),
        "a wrong type": asked("round 2, ask 1", model=torch.zeros(PARAMETERS, dtype=torch.float64)),
        "NaN": asked("round 2, ask 1", model=torch.full((PARAMETERS,), torch.nan)),
        "too large a message": asked("round 2, ask 1", model=torch.zeros(3_000_000)),
        "one more input": asked("round 2, ask 1", **{"shared.anything": 1}),
        "a diagnostics request": Envelope("diagnostics", {"run": RUN, "request": "round 1, ask 1"}),
        "an evaluation": Envelope(
            "task",
            {"run": RUN, "request": "round 2, ask 2", "task": "evaluate", "mechanism": "",
             "shared.model": torch.zeros(PARAMETERS)},
        ),
        "the second round": asked("round 2, ask 1"),
        "one more round than was accepted": asked("round 3, ask 1"),
    }.items():  # fmt: skip
        found[attack] = told(ask(envelope))
    # not an envelope at all
    node = roll.present()[name][0]
    message = Message(RecordDict({"x": ConfigRecord({"y": 1})}), dst_node_id=node, message_type="query", group_id="x")
    (number,) = grid.push_messages([message])
    replies = []
    while not replies:
        replies = list(grid.pull_messages([number]))
    found["no envelope"] = told(unpacked(replies[0].content))
    (folder / "answers.json").write_text(json.dumps(found))


app = server_app(main)
client = client_app()
