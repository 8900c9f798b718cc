"""Random numbers and names. Callers use the names here, at each use, so that a simulation replaces them."""

from random import Random, getrandbits, random, randrange, uniform
from secrets import token_hex, token_urlsafe
from uuid import uuid4


def new_random() -> Random:
    """Return a source of its own."""
    return Random()
