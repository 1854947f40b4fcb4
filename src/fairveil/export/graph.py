"""A model as an ONNX graph, checked against the model itself before anyone gets it."""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

INPUT, OUTPUT = "records", "scores"
PACKAGES = ("onnx", "onnxscript")


class NotExported(Exception):
    """This model cannot be written as a graph; the message says why."""


def can_export() -> bool:
    """Whether the packages are there."""
    return all(find_spec(package) for package in PACKAGES)


def onnx_bytes(module: nn.Module, features: Sequence[int], about: Mapping[str, str]) -> bytes:
    """The file: input "records" (batch, *features) float32, output "scores", any batch.

    Args:
        about: written beside the graph, as its metadata.

    Raises:
        NotExported: torch cannot trace the model, or the graph does not compute what the model does.
    """
    import onnx

    records = _records(2, features)
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                module, (records,), dynamo=True, input_names=[INPUT], output_names=[OUTPUT],
                dynamic_shapes=({0: "batch"},), verbose=False,
            )  # fmt: skip
            graph = program.model_proto  # type: ignore[union-attr]
            _forget_traces(graph)
            onnx.helper.set_model_props(graph, dict(about))
            onnx.checker.check_model(graph, full_check=True)
            for batch in (1, 3):  # neither is the batch it was traced with
                _check_same(graph, module, _records(batch, features))
        return bytes(graph.SerializeToString())
    except NotExported:
        raise
    except Exception as error:  # tracing runs the user's own code, and gives up in many ways
        raise NotExported((str(error) or type(error).__name__).strip().splitlines()[0]) from error


def _records(batch: int, features: Sequence[int]) -> Tensor:
    """Records out of nothing: amounts around 0, and numbers of words up to about 9."""
    numbers = np.random.default_rng(0).normal(scale=3, size=(batch, *features))
    return torch.from_numpy(numbers.astype(np.float32))


def _check_same(graph: Any, module: nn.Module, records: Tensor) -> None:
    """Refuse a graph that computes something else: a branch that depended on the values is frozen in a trace."""
    from onnx.reference import ReferenceEvaluator

    expected = module(records).numpy()
    evaluator: Any = ReferenceEvaluator(graph)
    (found,) = evaluator.run(None, {INPUT: records.numpy()})
    scale = float(np.abs(expected).max(initial=0.0))
    near = found.shape == expected.shape and np.allclose(found, expected, rtol=1e-3, atol=1e-4 * scale + 1e-6)
    if not near and math.isfinite(scale):
        raise NotExported(f"the graph gives other scores than the model, for {len(records)} records")


def _forget_traces(graph: Any) -> None:
    """Drop what the exporter notes of the machine it ran on: files, lines and the names inside of torch."""
    parts = [graph, graph.graph, *graph.functions, *graph.graph.node, *graph.graph.value_info]
    for part in [*parts, *graph.graph.input, *graph.graph.output, *graph.graph.initializer]:
        part.doc_string = ""
        del part.metadata_props[:]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's chatter: warnings about itself, log lines, progress on standard output."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
