"""The web console: pages in a browser, made from the HTTP API of a running Headrace. It needs the extra `console`."""
