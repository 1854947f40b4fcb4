"""A commented config to start from."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fairveil.algorithms import find_algorithm

TEMPLATE = """\
# A fairveil run. Check and price it without training: fairveil plan {path}
# Needed: data.dataset, model.name, algorithm.name, {needed}privacy.epsilon or privacy.noise_multiplier.
# Whatever else is left out has the value shown here; a dataset without a split is cut as suits it.
schema_version = 1
name = "{name}"
seed = 0                        # same seed, same run, on any number of cores

[data]
dataset = "digits"              # fairveil list datasets; or "file", or "package.module:Class"
# options = {{ path = "visits.csv", client = "hospital", target = "outcome", group = "hospital" }}  # for "file"
{split}
sizes = "rounded"               # how clients declare their size: rounded down, or "public" (exact)
{server}
[model]
name = "logistic"               # fairveil list models; or "package.module:Class"

[algorithm]
name = "{algorithm}"
{parameters}

[privacy]
{privacy}
noise = "reproducible"          # from the seed; or "secret", from a random key in the run folder
{trust}
[fairness]
groups = "cluster"              # clients are compared by the groups of the data; or a sensitive attribute
# positive = 1                  # the class that is an advantage, for demographic parity and equalised odds
# reference = "central"         # what privacy costs each group: a model of its pooled records; evaluation only

# [finetune]                    # after the last round, each client for itself; sends nothing. docs/fairness.md
# steps = 20                    # full-batch gradient steps on its own records
# learning_rate = 0.5
# local_steps = 200             # of the model that it trains alone, which is shown beside it

[engine]
kind = "local"                  # this machine; or "ray", a cluster. Other people's: see fairveil deploy
# workers = 2                   # one for each core if left out
# block = 8                     # clients that share a call; as many as are fastest if left out

[metrics]
every = 1                       # rounds between evaluations
"""


SERVER = """
[data.server]                   # public records, which the clients are asked about; no algorithm sees their labels
dataset = "digits"
rows = "test"                   # some of its test rows, the rest judges; "train" for a dataset that no client holds
# records = 100                 # half of the test rows if left out
judge = true                    # models are tested on the server's records; false: on the clients' own
"""
PRIVACY = """\
unit = "{unit}"                 # what is protected: one {protected}{others}
adjacency = "add-remove"        # or "replace", which needs more noise
epsilon = 8.0                   # the budget; or noise_multiplier = 1.0, never both
delta = 1e-3                    # below 1 / (number of protected {unit}s)
clip_norm = 1.0                 # bound on what one {unit} may contribute
accountant = "tightest"         # the smaller of "rdp" and "pld", both valid"""
METRIC = """\
unit = "metric"                 # what is protected: the local models of a client, by how far they are apart
noise_multiplier = 1.0          # nu, the mean length of the noise over the radius; or epsilon, never both
clip_norm = 1.0                 # r, the radius: how far a client may move a model in one round
# delta = 1e-4                  # for Gaussian noise; below 1 / (number of clients)"""


def template(algorithm: str, path: str) -> str:
    """A commented config to start from."""
    cls = find_algorithm(algorithm)
    lines = []
    for key, field in cls.model_fields.items():
        given = field.default is not None and not field.examples  # else the default depends on something
        line = (
            f"{key} = {json.dumps(field.default)}" if given else f"# {key} = {json.dumps((field.examples or [0])[0])}"
        )
        lines.append(f"{line:32}# {field.description}" if field.description else line)
    if cls.unit == "record":
        protected, trust = "record of one client", ""
        split = (
            'split = { kind = "rotate", degrees = [0, 90, 180], clients = [2, 4, 4] }\n'
            "# or iid, label-flip, dirichlet, shards, power-law, one-class, natural"
        )
    else:
        protected = "client with all its records"
        trust = '# trust = "server"             # or "secure-sum", which is simulated\n' if cls.unit == "client" else ""
        split = (
            'split = { kind = "iid", clients = 100 }\n'
            "# or rotate, label-flip, dirichlet, shards, power-law, one-class, natural"
        )
    name = re.sub(r"[^A-Za-z0-9]+", "-", Path(path).stem).strip("-") or "run"
    return TEMPLATE.format(
        path=path, name=name, algorithm=algorithm, parameters="\n".join(lines), split=split, trust=trust,
        needed="and " if cls.unit == "metric" else "privacy.delta, and ",
        privacy=METRIC
        if cls.unit == "metric"
        else PRIVACY.format(
            unit=cls.unit, protected=protected, others="".join(f'; or "{other}"' for other in cls.other_units)
        ),
        server=SERVER if cls.needs_public else "",
    )  # fmt: skip
