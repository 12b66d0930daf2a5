"""Metric families of Prometheus, made from the plain integers that the parts of a process keep.

Nothing is counted only for the metrics: a source turns what is there into families when a scrape asks
(`metrics_door`). It must not know what is measured.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from rpc.histogram import Histogram

PREFIX: Final = "chairlift_"
Source = Callable[[], Iterable[Metric]]
"""What reads some part of the process; called on the event loop."""

Labels = tuple[str, ...]


def counter(name: str, text: str, value: float) -> Metric:
    """A count since start; `name` without prefix and `_total`."""
    return CounterMetricFamily(PREFIX + name, text, value=value)


def counters(name: str, text: str, labels: Sequence[str], values: Mapping[Labels, float]) -> Metric:
    """Counts since start, by label values."""
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for of_labels, value in values.items():
        family.add_metric(of_labels, value)
    return family


def gauge(name: str, text: str, value: float) -> Metric:
    """How it is now."""
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def gauges(name: str, text: str, labels: Sequence[str], values: Mapping[Labels, float]) -> Metric:
    """How it is now, by label values."""
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for of_labels, value in values.items():
        family.add_metric(of_labels, value)
    return family


def histogram(name: str, text: str, observed: Histogram, scale: float = 1.0) -> Metric:
    """A distribution; what was observed is multiplied by `scale` (1e-6 for microseconds)."""
    return histograms(name, text, (), {(): observed}, scale)


def histograms(
    name: str, text: str, labels: Sequence[str], observed: Mapping[Labels, Histogram], scale: float = 1.0
) -> Metric:
    """Distributions, by label values."""
    family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
    for of_labels, one in observed.items():
        num_so_far, buckets = 0, []
        for bound, count in zip((*one.bounds, float("inf")), one.counts, strict=True):
            num_so_far += count
            le = "+Inf" if bound == float("inf") else repr(round(bound * scale, 12))
            buckets.append((le, num_so_far))
        family.add_metric(of_labels, buckets, one.total * scale)
    return family
