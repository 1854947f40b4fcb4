"""The report: figures of a run or a sweep, and the page that holds them."""

from fairveil.report.chart import Chart

__all__ = ["Chart"]
