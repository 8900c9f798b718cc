"""The HTTP edge: the only door to the ASGI library and its server."""
