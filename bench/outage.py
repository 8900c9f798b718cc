"""Draws an outage of a backend from a real run: `python -m bench.outage` writes docs/outage.svg."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp

from headrace.config.kafka import KafkaConfig
from headrace.consumers.lag import lag_of
from headrace.errors import NotFound
from headrace.kafka import Admin
from headrace_devkit.devcluster import Cluster, HeadraceProcess, PlannedResponse, RecordingBackend

TARGET = Path(__file__).parents[1] / "docs" / "outage.svg"
SECONDS, DOWN, UP = 60.0, 15.0, 35.0
"""Length of the run, and when the backend goes away and is back."""
PER_SECOND = 200
STEP_SECONDS = 0.5
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 300, 60, 60, 40, 40


class Sample(NamedTuple):
    """The state at one moment."""

    second: float
    lag: int
    delivered: int


async def produce(url: str, began: float) -> None:
    async with aiohttp.ClientSession() as session:
        sent = 0
        while (now := time.monotonic() - began) < SECONDS:
            count = int(now * PER_SECOND) - sent
            body = {"records": [{"key": f"k{sent + n}", "value": {"order": sent + n}} for n in range(count)]}
            async with session.post(f"{url}/producers/orders", json=body) as response:
                assert response.status == 200, await response.text()
            sent += count
            await asyncio.sleep(0.05)


async def watch(admin: Admin, backend: RecordingBackend, began: float) -> list[Sample]:
    samples: list[Sample] = []
    while (now := time.monotonic() - began) < SECONDS:
        away = DOWN <= now < UP
        backend.response = PlannedResponse(status=503) if away else PlannedResponse()
        try:
            lag = sum(entry.lag for entry in await lag_of(admin, "billing"))
        except NotFound:
            lag = 0
        samples.append(Sample(now, lag, len(backend.accepted)))
        await asyncio.sleep(STEP_SECONDS)
    return samples


async def run() -> list[Sample]:
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        backend = RecordingBackend()
        backend.start()
        kafka = {"bootstrap_servers": cluster.bootstrap_servers}
        consumer = {"topics": ["orders"], "group": "billing", "value_format": "json", "backend": {"url": backend.url}}
        process = HeadraceProcess({"kafka": kafka, "reactive_consumers": {"billing": consumer}}, Path(folder))
        admin = Admin(KafkaConfig(bootstrap_servers=cluster.bootstrap_servers))
        try:
            await admin.create_topic("orders", 3)
            process.start()
            process.wait_ready()
            began = time.monotonic()
            _, samples = await asyncio.gather(produce(process.url, began), watch(admin, backend, began))
            return samples
        finally:
            process.terminate()
            backend.stop()


def line(points: list[tuple[float, float]], most: float, colour: str) -> str:
    drawn = " ".join(
        f"{LEFT + second / SECONDS * (WIDTH - LEFT - RIGHT):.1f},"
        f"{HEIGHT - BOTTOM - value / most * (HEIGHT - TOP - BOTTOM):.1f}"
        for second, value in points
    )
    return f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>'


def drawing(samples: list[Sample]) -> str:
    """Return the plot: lag on the left axis, deliveries per second on the right one, the outage in grey."""
    rates = [
        (later.second, (later.delivered - former.delivered) / (later.second - former.second))
        for former, later in zip(samples, samples[2:], strict=False)
    ]
    lags = [(sample.second, float(sample.lag)) for sample in samples]
    most_lag, most_rate = (max(value for _, value in each) * 1.1 for each in (lags, rates))
    scale = (WIDTH - LEFT - RIGHT) / SECONDS
    base = HEIGHT - BOTTOM
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Lag and deliveries through an outage of the backend">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<rect x="{LEFT + DOWN * scale:.0f}" y="{TOP}" width="{(UP - DOWN) * scale:.0f}" height="{base - TOP}" '
        'fill="#e8e8e8"/>',
        f'<text x="{LEFT + (DOWN + UP) / 2 * scale:.0f}" y="{TOP + 16}" text-anchor="middle">503</text>',
        f'<path d="M{LEFT} {TOP}V{base}H{WIDTH - RIGHT}V{TOP}" fill="none" stroke="#888888"/>',
        f'<text x="{LEFT}" y="20" fill="#b04020">lag, records</text>',
        f'<text x="{WIDTH - RIGHT}" y="20" text-anchor="end" fill="#2050a0">records delivered per second</text>',
    ]
    for part in (0.0, 0.5, 1.0):
        y = base - part * (base - TOP) + 4
        text.append(f'<text x="{LEFT - 6}" y="{y:.0f}" text-anchor="end">{most_lag * part:,.0f}</text>')
        text.append(f'<text x="{WIDTH - RIGHT + 6}" y="{y:.0f}">{most_rate * part:,.0f}</text>')
    for second in range(0, int(SECONDS) + 1, 10):
        text.append(f'<text x="{LEFT + second * scale:.0f}" y="{base + 18}" text-anchor="middle">{second} s</text>')
    text += [line(lags, most_lag, "#b04020"), line(rates, most_rate, "#2050a0"), "</svg>"]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    taken = asyncio.run(run())
    TARGET.write_text(drawing(taken))
    sys.stdout.write(json.dumps({"most lag": max(each.lag for each in taken), "at the end": taken[-1]}) + "\n")
