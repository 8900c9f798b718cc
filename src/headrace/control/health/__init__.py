"""How consumers and clusters are: status, lag, and the preconditions of the guarantees."""
