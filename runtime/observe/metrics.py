"""A job in the OpenMetrics format, by the Prometheus client: a file that a node exporter collects, or an endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from optcc.errors import EnvironmentMissing
from optcc.runtime.observe.snapshot import JobSnapshot, RankView
from optcc.runtime.observe.status import UP

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

_RAIL = ("job", "rank", "nic")
_RANK = ("job", "rank")


class JobCollector:
    """What `take` returns at each scrape, as metrics."""

    def __init__(self, take: Callable[[], JobSnapshot]) -> None:
        self._take = take

    def collect(self) -> Iterator[Metric]:
        """All metrics of the job now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        job = self._take()

        def gauge(name: str, text: str, values: list[tuple[tuple[str, ...], float]], labels: tuple[str, ...]) -> Metric:
            family = GaugeMetricFamily(name, text, labels=labels)
            for key, value in values:
                family.add_metric((job.job, *key), value)
            return family

        def counter(name: str, text: str, of: Callable[[RankView], float]) -> Metric:
            family = CounterMetricFamily(name, text, labels=_RANK)
            for each in job.ranks:
                family.add_metric((job.job, str(each.rank)), of(each))
            return family

        ranks = [(str(each.rank), each) for each in job.ranks]
        rails = [(str(each.rank), rail) for each in job.ranks for rail in each.rails]
        at_fault = {rank for rank, _ in job.stragglers}
        waited: dict[int, float] = {}
        for wait in job.waits:
            waited[wait.rank] = max(waited.get(wait.rank, 0.0), wait.seconds)
        yield gauge("optcc_job_ranks", "Ranks of the job.", [((), job.n_ranks)], ("job",))
        yield gauge(
            *("optcc_rank_up", "1 while the rank's process is alive and has not failed."),
            [((rank,), each.process == "alive" and not each.failure) for rank, each in ranks],
            _RANK,
        )
        yield gauge(
            *("optcc_rank_waiting_seconds", "How long the rank has waited for others without going on."),
            [((rank,), waited.get(each.rank, 0.0)) for rank, each in ranks],
            _RANK,
        )
        yield gauge(
            *("optcc_rank_straggler", "1 if others wait for the rank, and it for nobody."),
            [((rank,), each.rank in at_fault) for rank, each in ranks],
            _RANK,
        )
        yield gauge("optcc_epoch", "Epoch of the plans.", [((rank,), each.epoch) for rank, each in ranks], _RANK)
        yield counter("optcc_collectives_begun", "Collectives that the rank has begun.", lambda each: each.begun)
        yield counter("optcc_collectives_done", "Collectives that the rank has ended.", lambda each: each.done)
        yield counter("optcc_chunks_resent", "Chunks sent again.", lambda each: each.counts.get("resent", 0))
        yield gauge(
            *("optcc_nic_up", "1 unless the NIC is doubted, silent or down."),
            [((rank, rail.name), rail.state == UP) for rank, rail in rails],
            _RAIL,
        )
        for way in ("out", "in"):
            yield gauge(
                *(f"optcc_nic_{way}_rate_bytes_per_second", f"Declared or measured rate {way}."),
                [((rank, rail.name), getattr(rail, f"{way}_rate")) for rank, rail in rails],
                _RAIL,
            )
            yield gauge(
                *(f"optcc_nic_{way}_share", f"Share of that rate that the NIC carries {way}."),
                [((rank, rail.name), getattr(rail, f"{way}_share")) for rank, rail in rails],
                _RAIL,
            )
        yield gauge(
            *("optcc_nic_doubts", "Connections over the NIC that are suspected or avoided."),
            [((rank, rail.name), rail.doubts) for rank, rail in rails],
            _RAIL,
        )
        for name, text, field in (
            ("optcc_nic_sent_bytes", "Bytes sent, with headers.", "sent_bytes"),
            ("optcc_nic_received_bytes", "Bytes received, with headers.", "received_bytes"),
            ("optcc_nic_failures", "Connections lost over the NIC.", "failures"),
        ):
            family = CounterMetricFamily(name, text, labels=_RAIL)
            for rank, rail in rails:
                family.add_metric((job.job, rank, rail.name), getattr(rail, field))
            yield family


def registry_of(take: Callable[[], JobSnapshot]) -> CollectorRegistry:
    """A registry with the job alone; raises EnvironmentMissing without the Prometheus client."""
    try:
        from prometheus_client.registry import CollectorRegistry
    except ImportError:
        raise EnvironmentMissing("metrics need prometheus_client: pip install 'optcc[metrics]'") from None
    registry = CollectorRegistry()
    registry.register(JobCollector(take))
    return registry


def openmetrics(job: JobSnapshot) -> bytes:
    """A snapshot in the OpenMetrics text format."""
    registry = registry_of(lambda: job)
    from prometheus_client.openmetrics.exposition import generate_latest

    data: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return data


def serve(take: Callable[[], JobSnapshot], port: int, address: str) -> Callable[[], None]:
    """Answers scrapes at a port, in a thread of its own; returns what ends it."""
    registry = registry_of(take)
    from prometheus_client import start_http_server

    server, thread = start_http_server(port, address, registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
