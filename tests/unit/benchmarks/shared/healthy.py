"""A healthy server, with a child that outlives it."""

import argparse
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option in ("--host", "--children"):
        parser.add_argument(option)
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(arguments.children).write_text(str(child.pid))
    HTTPServer((arguments.host, arguments.port), Handler).serve_forever()
