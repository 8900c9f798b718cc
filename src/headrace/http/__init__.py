"""The HTTP edge: connections, requests, endpoints and callers. It imports no feature."""
