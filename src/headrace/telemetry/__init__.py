"""What Headrace tells of itself: logs, metrics, and the id that ties one request's traces together."""
