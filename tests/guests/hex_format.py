"""One more format: values are hexadecimal digits in JSON."""

import json
from typing import Final


class HexCodec:
    """Bytes, as a JSON string of digits."""

    decode_python: Final = bytes.hex

    def encode(self, text: bytes) -> bytes:
        return bytes.fromhex(json.loads(text))

    def decode(self, data: bytes) -> bytes:
        return json.dumps(data.hex()).encode()
