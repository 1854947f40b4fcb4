"""One private training step, in samples per second on one thread, beside Opacus, vmap and plain SGD.

python benchmarks/step.py                  all models and competitors; writes docs/results/benchmark-step.json
python benchmarks/step.py --quick --json   cnn, logistic and mlp in under a minute; prints the ratios only
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it finds the folder it stands in only

from benchmarks import breakdown
from benchmarks import competitors as c
from benchmarks.common import busy, machine, save, say, take_turns
from fairveil.models import ModelSpec
from fairveil.processes import keep_memory

torch.set_num_threads(1)
keep_memory()  # as the workers of the engine do; it helps all competitors

PLAIN_IMAGES = {"plain_channels_last": c.PlainChannelsLast, "plain_default_layout": c.Plain}
PLAIN_BATCHED = {"plain_in_out": c.PlainBatched, "plain_out_in": c.PlainBatchedTransposed}
BY_HAND = {"by_hand": c.PlainByHand}  # beside the baseline, for who wants to know what autograd costs
PRIVATE = {"opacus_hooks": c.OpacusHooks, "opacus_ghost": c.OpacusGhost, "vmap": c.Vmap, "fairveil": c.Fairveil}
PEAK = 2048  # rows of the square matrices whose product shows what the processor can do
AGREED = 0.01  # fairveil clips to 0.4% less than its bound, to have room for rounding; a mistake is larger


@dataclass(frozen=True)
class Workload:
    """A model with its clients, and the non-private steps of which the fastest is the baseline."""

    spec: ModelSpec
    clients: int
    plain: Mapping[str, Callable[[c.Task], Any]]
    records: int = 2300

    def task(self, noise_multiplier: float = c.NOISE_MULTIPLIER) -> c.Task:
        return c.Task(self.spec, self.clients, self.records, noise_multiplier)


WORKLOADS = {
    "cnn": Workload(ModelSpec("cnn", (1, 28, 28), 10), 1, PLAIN_IMAGES),
    "logistic": Workload(ModelSpec("logistic", (784,), 10), 20, PLAIN_BATCHED),
    "mlp": Workload(ModelSpec("mlp", (784,), 10), 20, PLAIN_BATCHED),
    "resnet18-gn": Workload(ModelSpec("resnet18-gn", (3, 32, 32), 10), 1, PLAIN_IMAGES, records=500),
    "lstm": Workload(
        ModelSpec("lstm", (32,), 10, {"vocabulary": 1000, "embedding": 32, "hidden": 64, "layers": 1}),
        1, {"plain": c.Plain},
    ),
}  # fmt: skip
QUICK = ("cnn", "logistic", "mlp")


def flops_per_sample(task: c.Task) -> int:
    """What a gradient needs: 2 for each multiply-add of forward, of the gradients of activations and of weights.

    Counted from the shapes of linear and convolution layers; the first layer needs no gradient of its input. What
    privacy adds (norms, clipping) is not counted, so it lowers the share of the limit that is reached.
    """
    module, total = task.module(), 0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        per_output = layer.weight[0].numel()  # multiply-adds behind one output value
        total += 2 * output.numel() * per_output * (3 if inputs[0].requires_grad else 2)

    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.register_forward_hook(count)
    module(task.x[0, :1])
    return total


def compared(workload: Workload) -> tuple[dict[str, float], dict[str, str]]:
    """How far from vmap's each private step ends without noise, over the length of the step; and who is left out.

    Equal work is part of a fair comparison: who refuses the model or gets another answer is not compared but named.
    """
    task = workload.task(noise_multiplier=0.0)
    ends, left_out = {}, {}
    for name, competitor in PRIVATE.items():
        try:
            built = competitor(task)
            start = built.weights()
            built.step()
            ends[name] = built.weights() - start
        except NotImplementedError as error:
            left_out[name] = str(error)
    gaps = {name: float((end - ends["vmap"]).norm() / ends["vmap"].norm()) for name, end in ends.items()}
    wrong = {name: f"its step differs from that of vmap by {gap:.1%}" for name, gap in gaps.items() if not gap < AGREED}
    return gaps, left_out | wrong


def measure(name: str, *, quick: bool) -> dict[str, Any]:
    """Samples per second of every competitor, and the ratios that count."""
    workload = WORKLOADS[name]
    task, silent = workload.task(), workload.task(noise_multiplier=0.0)
    plain, private = dict(workload.plain), dict(PRIVATE)
    if quick:
        del private["opacus_ghost"], private["vmap"]
        plain.pop("plain_default_layout", None)
    gaps, left_out = ({}, {}) if quick else compared(workload)
    extra = BY_HAND if workload.plain is PLAIN_BATCHED and not quick else {}
    rivals = {label: build for label, build in {**plain, **extra, **private}.items() if label not in left_out}
    steps = {label: build(task).step for label, build in rivals.items()}
    steps["fairveil_without_noise"] = c.Fairveil(silent).step
    matrix = torch.rand(PEAK, PEAK)
    steps["sgemm"] = lambda: matrix @ matrix
    times = take_turns(steps, turns=6, seconds=0.2)
    peak = 2 * PEAK**3 / min(times.pop("sgemm"))
    samples = workload.clients * c.BATCH
    speed = {label: samples / min(turns) for label, turns in times.items()}
    baseline = max(plain, key=speed.__getitem__)
    flops = flops_per_sample(task)
    return {
        "clients": workload.clients,
        "parameters": sum(p.numel() for p in task.module().parameters()),
        "samples_per_second": speed,
        "baseline": baseline,
        "vs_opacus": speed["fairveil"] / speed["opacus_hooks"],
        "vs_plain": speed["fairveil"] / speed[baseline],
        "vs_plain_without_noise": speed["fairveil_without_noise"] / speed[baseline],
        "share_of_flop_limit": speed["fairveil"] * flops / peak,
        "flops_per_sample": flops,
        "sgemm_gflops": peak / 1e9,
        "distance_from_vmap": gaps,
        "left_out": left_out,
        "seconds_per_step": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three models, the competitors that the ratios need")
    parser.add_argument("--json", action="store_true", help="print the ratios as one JSON object and nothing else")
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, help="these only; nothing is written")
    options = parser.parse_args()
    names = options.models or (QUICK if options.quick else tuple(WORKLOADS))
    others = busy()
    results = {}
    for name in names:
        say(f"step: {name}")
        results[name] = measure(name, quick=options.quick)
    if not (options.quick or options.models):
        found = machine("opacus", threads=1, others=others) | {"batch": c.BATCH, "models": results}
        found["breakdown"] = {name: breakdown.measure(WORKLOADS[name].task()) for name in ("cnn", "mlp")}
        save("step", found)
    ratios = ("vs_opacus", "vs_plain", "vs_plain_without_noise", "share_of_flop_limit")
    if options.json:
        shown = {name: {ratio: round(found[ratio], 3) for ratio in ratios} for name, found in results.items()}
        sys.stdout.write(json.dumps(shown) + "\n")
        return
    for name, found in results.items():
        sys.stdout.write(f"\n{name} ({found['clients']} clients, {found['parameters']:,} parameters)\n")
        for label, speed in sorted(found["samples_per_second"].items(), key=lambda item: -item[1]):
            sys.stdout.write(f"  {label:24}{speed:12,.0f} samples/s\n")
        sys.stdout.write("  " + ", ".join(f"{ratio} {found[ratio]:.2f}" for ratio in ratios) + "\n")


if __name__ == "__main__":
    main()
