"""Decides for exactly-once sinks whether to write a micro-batch, or the part of one task."""

from typing import Literal


def decide(
    number: int, target_next: int | None, *, changed: bool, may_lag: bool, accepts: bool
) -> Literal["write", "skip", "ahead", "unknown"]:
    """Compare a batch with what its target has.

    | The target's next batch is | and its last digest is | then | with `accepts` |
    |---|---|---|---|
    | more than one further than this | any | `ahead` | `ahead` |
    | one further than this | another (`changed`) | `ahead` | `write` |
    | one further than this | the same, or none | `skip` | `skip` |
    | this | any | `write` | `write` |
    | an earlier one, or none, and `may_lag` | any | `write` | `write` |
    | an earlier one, or none, else | any | `unknown` | `write` |

    Args:
        number: Number of the batch.
        target_next: Number of the next batch by the target; None if it has none.
        changed: Whether the target wrote its last batch with another digest than this one has.
        may_lag: Whether a target may be behind without having lost a number.
        accepts: Whether a batch in doubt is written, perhaps a second time (`sink.accept_unknown_batch`).
    """
    if target_next is None or target_next < number:
        return "write" if may_lag or accepts else "unknown"
    if target_next == number + 1 and changed:
        return "write" if accepts else "ahead"
    if target_next > number + 1:
        return "ahead"
    return "write" if target_next == number else "skip"
