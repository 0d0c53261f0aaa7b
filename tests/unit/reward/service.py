"""A real HTTP service of a test: answers what the test scripted and remembers what it was asked."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """Status, body and headers of one reply; drip: seconds between the bytes of the body."""

    status: int = 200
    body: Any = None  # bytes as they are, anything else as JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    drip: float = 0.0


@dataclass
class Service:
    """Where it listens, and the requests so far in the order of their arrival."""

    url: str
    asked: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    done: threading.Event = field(default_factory=threading.Event)  # set when the test is over


@contextmanager
def serving(answer: Callable[[int, Any], Answer]) -> Iterator[Service]:
    """answer(number of the request from 0, decoded body); it may wait."""
    lock = threading.Lock()
    here = 0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal here
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(service.asked)
                service.asked.append(body)
                service.headers.append(dict(self.headers))
                here += 1
                service.most_at_once = max(service.most_at_once, here)
            reply = answer(number, body)
            with lock:
                here -= 1
            self._send(reply)

        def _send(self, reply: Answer) -> None:
            content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if not reply.drip:
                self.wfile.write(content)
                return
            for place in range(len(content)):
                if service.done.wait(reply.drip):
                    return
                try:
                    self.wfile.write(content[place : place + 1])
                except OSError:  # the caller has gone
                    return

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service = Service(f"http://127.0.0.1:{server.server_address[1]}/score")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        service.done.set()
        server.shutdown()
        thread.join()
        server.server_close()


def scores_of(body: Any) -> list[float]:
    """What an honest service says: 1 where response and answer agree."""
    return [float(sample["response"] == sample["answer"]) for sample in body["samples"]]


def honest(number: int, body: Any) -> Answer:
    """The honest service."""
    return Answer(body={"scores": scores_of(body)})
