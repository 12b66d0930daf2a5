"""One scrape of a process' metrics, read as Prometheus reads it, and checked to be what a scrape may be."""

import http.client
import socket
from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from rpc.address import Address

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Samples by full name (`…_total`, `…_bucket`) and labels."""

    samples: dict[tuple[str, Labels], float]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of `chairlift_NAME` that have these labels, 0 without any."""
        wanted = frozenset(labels.items())
        return sum(
            value
            for (sample, given), value in self.samples.items()
            if sample == f"chairlift_{name}" and wanted <= given
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Samples of `chairlift_NAME`, added up by one label."""
        sums: defaultdict[str, float] = defaultdict(float)
        for (sample, given), value in self.samples.items():
            if sample == f"chairlift_{name}":
                sums[dict(given)[label]] += value
        return dict(sums)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.samples}


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def get(address: str, path: str = "/metrics") -> tuple[int, str]:
    """Status and body."""
    where = Address.parse(address, field="address")
    connection: http.client.HTTPConnection
    if where.unix_path is not None:
        connection = _UnixConnection(where.unix_path)
    else:
        connection = http.client.HTTPConnection(where.target, timeout=20)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def scrape(address: str) -> Scrape:
    """What a process tells now. Nothing is negative, no sample is twice, no bucket below the one before."""
    status, text = get(address)
    assert status == 200, text
    return parsed(text)


def parsed(text: str) -> Scrape:
    samples: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(text):
        before: dict[Labels, float] = {}
        for sample in family.samples:
            name = (sample.name, frozenset(sample.labels.items()))
            assert name not in samples, f"{name} is there twice"
            assert sample.value >= 0, f"{name} is negative"
            samples[name] = sample.value
            if sample.name.endswith("_bucket"):
                of = frozenset(item for item in sample.labels.items() if item[0] != "le")
                assert sample.value >= before.get(of, 0.0), f"{name} is less than the bucket before"
                before[of] = sample.value
    return Scrape(samples)
