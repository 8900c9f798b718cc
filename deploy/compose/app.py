"""An application that gets records of the topic `orders` from its sidecar, and prints them."""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Records(BaseHTTPRequestHandler):
    """Accepts every batch."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Print a batch; the status 204 completes its records."""
        batch = self.rfile.read(int(self.headers["Content-Length"])).decode()
        sys.stdout.write(batch + "\n")
        sys.stdout.flush()
        self.send_response(204)
        self.end_headers()


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", 8080), Records).serve_forever()
