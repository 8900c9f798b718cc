"""The cost of TLS and a login: the same work over both listeners of one broker, in turns."""

from __future__ import annotations

from bench.compare import ROWS
from bench.environment import Bench
from bench.measured import Measured, median_of, table
from headrace_devkit.devcluster import Cluster
from headrace_devkit.devcluster.token_server import TokenServer
from headrace_devkit.testing.secured import SecuredCluster

ROUNDS = 3
WORK = {
    "produce": "100 records per request, 16 connections, records",
    "produce-single": "1 record per request, 64 connections, requests",
    "push": "100 records per POST, records",
    "function": "no-op function, records",
}
PLAIN, SECURED = "plain", "secured"


class SecuredTable:
    """Measures, and prints the results."""

    title = "TLS and login"
    text = f"""\
Medians of {ROUNDS} rounds in turns on one broker: its listener without TLS and login, and that with TLS 1.3 and
SCRAM-SHA-512. The broker encrypts on the same processors."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.runs: dict[tuple[str, str], list[Measured]] = {}

    def measure(self) -> None:
        folder = self.bench.folder
        with Cluster(folder / "secured", secured=True) as cluster:
            logins = SecuredCluster(cluster, cluster.security, TokenServer(folder / "tokens", cluster.security))
            bench = Bench(cluster, folder, self.bench.scale)
            sections = {PLAIN: bench.kafka, SECURED: logins.login()}
            for turn in range(ROUNDS):
                for work in WORK:
                    for name in (PLAIN, SECURED) if turn % 2 else (SECURED, PLAIN):
                        bench.kafka = sections[name]
                        self.runs.setdefault((work, name), []).append(ROWS[work](bench))

    def lines(self) -> list[str]:
        rows = []
        for work, title in WORK.items():
            plain, secured = self.runs[work, PLAIN], self.runs[work, SECURED]
            rates = [median_of("rate", runs) for runs in (plain, secured)]
            costs = [median_of("cpu_us", runs) for runs in (plain, secured)]
            stolen = max(run.stolen for run in (*plain, *secured))
            rows.append(
                f"{title} | {rates[0]:,.0f} | {rates[1]:,.0f} | **{rates[1] / rates[0]:.2f}** | {costs[0]:.1f} | "
                f"{costs[1]:.1f} | {stolen:.0%}"
            )
        head = "work | plain per s | secured per s | ratio | plain, processor us each | secured | stolen"
        return table(head, rows)
