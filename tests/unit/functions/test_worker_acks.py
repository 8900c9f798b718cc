"""Acknowledgements in a worker: each gets the response with its number, whatever the order, and none waits for ever."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from headrace.functions import protocol
from headrace.functions.worker.loop import Acks

ACTIONS = st.one_of(
    st.tuples(st.just("send"), st.just(0)),
    st.tuples(st.just("response"), st.integers(0, 8)),
    st.tuples(st.just("close"), st.just(0)),
)


@given(actions=st.lists(ACTIONS, min_size=3, max_size=30))
def test_each_acknowledgement_gets_its_own_response(actions: list[tuple[str, int]]) -> None:
    """Answers come in any order, some twice, and the parent may close the connection."""

    async def run() -> None:
        sent: list[protocol.Ack] = []
        acks = Acks(lambda message: sent.append(message) if isinstance(message, protocol.Ack) else None)
        calls: list[asyncio.Task[str]] = []
        responses: dict[int, str] = {}

        def answer(number: int, problem: str) -> None:
            responses.setdefault(number, problem)
            acks.answered(protocol.Acked(sent[number].number, problem))

        for what, number in actions:
            count = len(sent)
            if what == "send":
                call = asyncio.ensure_future(acks.send("t", 0, len(calls)))
                await asyncio.sleep(0)
                if acks.closed:
                    assert len(sent) == count
                    assert "closed" in await call
                else:
                    assert [sent[-1].offset, len(sent)] == [len(calls), count + 1]
                    calls.append(call)
            elif what == "response" and sent and not acks.closed:
                answer(number % len(sent), f"problem {number}" if number % 2 else "")
            elif what == "close":
                acks.close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert {n: call.result() for n, call in enumerate(calls) if call.done() and n in responses} == responses
            assert all(call.done() or not acks.closed for call in calls), "it waits for ever"
        for number in range(0 if acks.closed else len(sent)):
            answer(number, "")
        async with asyncio.timeout(5):
            results = await asyncio.gather(*calls)
        assert all(results[n] == responses[n] if n in responses else "closed" in results[n] for n in range(len(calls)))

    asyncio.run(run())
