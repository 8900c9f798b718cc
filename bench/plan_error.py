"""How far `headrace plan` is from a real run at 1/1000 of 4,000 consumers and 764,000 records a second.

`python -m bench.plan_error` measures this machine with other configurations, a constant at a time; plans four consumers
on two processes with these constants; runs them; and prints the error of each figure.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy
from confluent_kafka import Producer

from bench.curve import processor_seconds
from bench.environment import Bench, pid
from bench.measured import table
from bench.offset_commits import offset_records
from bench.push import Sink, push
from bench.sizing import megabytes
from headrace.config.consumers import ReactiveConsumerConfig
from headrace_devkit.devcluster import Cluster, HeadraceProcess
from headrace_devkit.plan import cost
from headrace_devkit.plan.deployment_plan import deployment_of
from headrace_devkit.plan.rates import ConsumerRate, ProcessRates, Rates

SETTLED_SECONDS, BACKEND_SECONDS = 5.0, 0.001
PROCESSES, SECONDS, WARM_SECONDS = 2, 30, 10
"""Of the run that is planned; until then each partition has committed once."""
WEIGHTS = (435, 232, 161, 123)
"""The largest consumers of 4,000 under Pareto's law with 1.1, relative to each other."""
PLANNED = {
    f"c{n}": ConsumerRate(764 * w / sum(WEIGHTS), 500 * w // sum(WEIGHTS), BACKEND_SECONDS)
    for n, w in enumerate(WEIGHTS)
}
MANY, BACKLOG, SINGLES = 20, 300_000, 30_000
FEW_PARTITIONS, MORE_PARTITIONS, RATE, CONSTANT_SECONDS = 8, 400, 300.0, 12
WAITS = {"fetch.min.bytes": 1_000_000, "fetch.wait.max.ms": 100}


class Found(NamedTuple):
    """What processes took, per process where it is not a share."""

    cores: float
    threads: float
    files: float
    megabytes: float
    offsets: float
    """Offset records per record."""


def produce(bench: Bench, load: Mapping[str, ConsumerRate], topics: Mapping[str, str], seconds: float) -> int:
    """Write each record when it is due, after a random time and to a random partition; return how many."""
    chance, written = random.Random(7), 0
    producer = Producer({"bootstrap.servers": bench.cluster.bootstrap_servers, "linger.ms": 0, "log_level": 0})
    names, rates = [*load], [one.records_per_second for one in load.values()]
    due = time.monotonic()
    end = due + seconds
    while names and (due := due + chance.expovariate(sum(rates))) < end:
        time.sleep(max(0.0, due - time.monotonic()))
        name = chance.choices(names, rates)[0]
        partition = chance.randrange(load[name].partitions)
        producer.produce(topics[name], b"x" * load[name].record_bytes, partition=partition)
        producer.poll(0)
        written += 1
    time.sleep(max(0.0, end - time.monotonic()))
    producer.flush(30)
    return written


def measured(
    bench: Bench,
    load: Mapping[str, ConsumerRate],
    processes: int = 1,
    warm_seconds: float = 2.0,
    seconds: float = CONSTANT_SECONDS,
    **properties: Any,
) -> Found:
    """Run consumers at their rates."""
    topics = {name: bench.topic(name, rate.partitions) for name, rate in load.items()}
    with Sink(10**9) as sink:
        backend, consumer = {"url": f"http://127.0.0.1:{sink.port}/"}, {"properties": properties}
        own = {
            name: {"topics": [topic], "group": f"{name}-{time.time_ns()}", "backend": backend, "consumer": consumer}
            for name, topic in topics.items()
        }
        running = [bench.headrace({"reactive_consumers": own}) for _ in range(processes)]
        time.sleep(SETTLED_SECONDS)
        loaded = {name: rate for name, rate in load.items() if rate.records_per_second}
        produce(bench, loaded, topics, warm_seconds)
        offsets = offset_records(bench.cluster.bootstrap_servers) if loaded else 0
        used, begun = [*map(processor_seconds, running)], time.monotonic()
        written = produce(bench, loaded, topics, seconds)
        took = time.monotonic() - begun
        cores = [(processor_seconds(one) - before) / took for one, before in zip(running, used, strict=True)]
        offsets = offset_records(bench.cluster.bootstrap_servers) - offsets if loaded else 0
        found = Found(fmean(cores), *at_rest(running), offsets / max(1, written))
        for one in running:
            one.terminate()
    return found


def at_rest(running: Sequence[HeadraceProcess]) -> tuple[float, float, float]:
    """Return threads, files and megabytes of a process."""
    roots = [pid(one) for one in running]
    statuses = [Path(f"/proc/{root}/status").read_text() for root in roots]
    threads = [int(re.findall(r"^Threads:\s+(\d+)", status, re.MULTILINE)[0]) for status in statuses]
    files = [len(list(Path(f"/proc/{root}/fd").iterdir())) for root in roots]
    return fmean(threads), fmean(files), fmean(map(megabytes, roots))


def settings(**properties: Any) -> ReactiveConsumerConfig:
    return ReactiveConsumerConfig.model_validate(
        {
            "topics": ["t"],
            "group": "g",
            "backend": {"url": "http://localhost:1/"},
            "consumer": {"properties": properties},
        }
    )


NOW, LATER = settings(), settings(**WAITS)


def constants(bench: Bench) -> ProcessRates:
    """Measure this machine: at rest, with records that wait, and with those that come one by one."""
    rest = measured(bench, {})
    many = measured(bench, {f"r{n}": ConsumerRate(0, FEW_PARTITIONS) for n in range(MANY)})
    consumer = (many.cores - rest.cores) / MANY
    few, more = (ConsumerRate(RATE, count, BACKEND_SECONDS) for count in (FEW_PARTITIONS, MORE_PARTITIONS))
    narrow, wide = measured(bench, {"one": few}), measured(bench, {"one": more})
    waits = measured(bench, {"one": more}, **WAITS)
    for name, one in (("rest", rest), ("many", many), ("narrow", narrow), ("wide", wide), ("waits", waits)):
        print(f"{name}: {one}", flush=True)
    delivery, record = backlogs(bench)
    counts = [cost.counts_of(own, rate, 1) for own, rate in ((NOW, few), (NOW, more), (LATER, more))]
    equations, sides = [], []
    for run, each in zip((narrow, wide, waits), counts, strict=True):
        cores = run.cores - rest.cores - consumer
        # As in `cost.cores_of`: what is neither of records nor of deliveries is of partitions and of waking up.
        equations.append([each.partitions, (1 - cores) ** 2 * each.responses, (1 - cores) ** 2 * each.deliveries])
        sides.append(cores - each.records * record - each.deliveries * delivery)
    partition, fetch, reply = map(float, numpy.linalg.solve(equations, sides))
    return ProcessRates(
        record_microseconds=record * 1e6,
        delivery_microseconds=delivery * 1e6,
        partition_microseconds=partition * 1e6,
        fetch_microseconds=fetch * 1e6,
        reply_microseconds=reply * 1e6,
        process_millicores=rest.cores * 1000,
        consumer_millicores=consumer * 1000,
        process_threads=wide.threads - cost.THREADS_PER_CONSUMER,
        process_megabytes=rest.megabytes,
    )


def backlogs(bench: Bench) -> tuple[float, float]:
    """Return the processor seconds of a delivery and of a record, where nothing waits."""
    batch = NOW.batch.max_records
    large = push(bench, bench.full(BACKLOG), BACKLOG, "status").cpu_seconds / BACKLOG
    alone = push(bench, bench.full(SINGLES), SINGLES, "single", ordering="none").cpu_seconds / SINGLES
    delivery = (alone - large) / (1 - 1 / batch)
    return delivery, large - delivery / batch


def planned(load: Mapping[str, ConsumerRate], costs: ProcessRates) -> Found:
    """Return what `headrace plan` says."""
    plan = deployment_of(dict.fromkeys(load, settings()), Rates(dict(load), {}, costs))
    return Found(
        fmean(plan.cores),
        fmean(plan.threads),
        fmean(plan.files),
        fmean(plan.megabytes),
        plan.offset_records / plan.records_per_second,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        bench = Bench(cluster, Path(folder), 1.0)
        costs = msgspec.structs.replace(constants(bench), count=PROCESSES, copies=PROCESSES)
        found = measured(bench, PLANNED, PROCESSES, WARM_SECONDS, SECONDS)
    plan = planned(PLANNED, costs)
    errors = {name: getattr(plan, name) / getattr(found, name) - 1 for name in Found._fields}
    rows = [f"{n} | {getattr(plan, n):.3f} | {getattr(found, n):.3f} | {errors[n]:+.0%}" for n in Found._fields]
    print("\n".join(table("figure, of a process | planned | measured | error", rows)))
    print(f"largest error {max(map(abs, errors.values())):.0%}; constants of this machine: {costs}")


if __name__ == "__main__":
    main()
