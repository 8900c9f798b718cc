"""The HTTP edge: the only package that uses the ASGI library and its server."""
