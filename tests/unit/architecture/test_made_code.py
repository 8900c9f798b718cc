"""Code that is made from other code."""

from tools.blocking_client import MADE, made


def test_the_synchronous_client_is_made_from_the_asynchronous_one() -> None:
    """Who changes one of them runs `python -m tools.blocking_client`."""
    assert MADE.read_text() == made()
