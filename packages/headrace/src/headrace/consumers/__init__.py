"""What push and functions share: running consumers, their pumps and retry topics, lag, and preconditions."""
