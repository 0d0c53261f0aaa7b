"""An S3-compatible server in this process, whose requests can be counted and made to fail."""

import logging
import threading
import uuid
from collections.abc import Callable
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

BUCKET = "runs"
Request = tuple[str, str]  # method, path


class Storage:
    """The server. `requests`: every request so far; `fails`: which of them are answered with an internal error."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer | None = None
        self._port = 0
        self.requests: list[Request] = []
        self.fails: Callable[[Request], bool] = lambda request: False
        self.overwrites = False  # as storage that does not know exclusive creation
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """What clients need to know; one try each, so that a failure shows at once."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def make_bucket(self) -> None:
        """The bucket of all tests."""
        boto3.client("s3").create_bucket(Bucket=BUCKET)

    def start(self) -> None:
        """Listen, on the same port as before; what was stored is still there."""
        self._server = make_server("127.0.0.1", self._port, self._answer, threaded=True)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def new_root(self) -> str:
        """A root that nothing was written to."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex}"

    def written(self, part: str) -> list[str]:
        """Paths of the objects put so far that contain this part, in order."""
        return [path for method, path in self.requests if method == "PUT" and part in path]

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        request = (environ["REQUEST_METHOD"], environ["PATH_INFO"])
        self.requests.append(request)
        if self.fails(request):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        if self.overwrites:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        return self._app(environ, start_response)
