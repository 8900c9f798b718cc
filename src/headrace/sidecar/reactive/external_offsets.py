"""The offsets of a group, requested from a backend that keeps them with its own data."""

from typing import Annotated
from urllib.parse import urlencode

import msgspec

from headrace.errors import DestinationUnavailable
from headrace.records import TopicPartition
from headrace.sidecar.reactive.client import Client


class _Answer(msgspec.Struct):
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None


_decode = msgspec.json.Decoder(_Answer).decode


class ExternalOffsets:
    """Asks `GET path?group=&topic=&partition=&epoch=`; the answer is `{"offset": n}`, null for none."""

    def __init__(self, client: Client, path: str) -> None:
        self._client = client
        self._path = path

    async def ask(self, group: str, partition: TopicPartition, epoch: int) -> int | None:
        """Return the offset of the next record of a partition, None where the backend has none.

        Raises:
            DestinationUnavailable: The backend does not say it.
        """
        query = {"group": group, "topic": partition.topic, "partition": partition.partition, "epoch": epoch}
        answer = await self._client.get(f"{self._path}?{urlencode(query)}")
        try:
            if answer.status == 200:
                return _decode(answer.body).offset
            why = f"HTTP {answer.status}"
        except (msgspec.MsgspecError, RecursionError) as cause:
            why = f'a body that is not {{"offset": n}}: {cause}'
        raise DestinationUnavailable(f"GET {self._path} of {self._client.url} answers {why}")
