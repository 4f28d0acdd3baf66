"""`fewbit explore`: the explorer on the loopback address, with a solver behind it.

Another site that a visitor has open must not reach it: a request has to name the loopback address as its host (against
names that resolve to it), and a question to the solver has to come from this page. What is served is a fixed list of
names, so that no path leads to a file.
"""

import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..tables import FewbitError
from ..tables.files import reason
from .explorer_site import site
from .solver_process import Busy, SolverProcess

ADDRESS = "127.0.0.1"
_LONGEST_REQUEST = 65_536  # bytes
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class ExplorerServer(ThreadingHTTPServer):
    """The server; `serve_forever` runs it.

    Args:
        port: to listen on; 0 takes a free one.
        solver: answers the page's questions.

    Raises:
        FewbitError: the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, port: int, solver: SolverProcess) -> None:
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise FewbitError(f"cannot listen on port {port}: {reason(error)}") from None
        self.solver = solver
        self.files = site(with_solver=True)

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{ADDRESS}:{self.server_port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Values of the header Host that name this server; browsers leave out the port of http itself."""
        names = ADDRESS, "localhost"
        return *(f"{name}:{self.server_port}" for name in names), *(names if self.server_port == 80 else ())


class _Refused(Exception):
    """A request that gets an error: its status and one line."""

    def __init__(self, status: HTTPStatus, line: str) -> None:
        super().__init__(line)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: ExplorerServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "fewbit", ""
    timeout = 20  # seconds without a byte from the other end

    def do_GET(self) -> None:
        """Send a file of the site."""
        self._answer(self._file)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Solve, and send the table."""
        self._answer(self._solution)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal belongs to the command."""

    def _answer(self, make: Any) -> None:
        try:
            if self.headers.get("Host") not in self.server.hosts:
                raise _Refused(HTTPStatus.FORBIDDEN, f"this server is {self.server.url}")
            status, kind, text = HTTPStatus.OK, *make()
        except _Refused as refused:
            status, kind, text = refused.status, "application/json", json.dumps({"error": str(refused)})
        content = text.encode()
        try:
            self.send_response(status)
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
        except (ConnectionError, TimeoutError):  # the visitor left
            self.close_connection = True

    def _file(self) -> tuple[str, str]:
        name = self.path.partition("?")[0].lstrip("/") or "index.html"
        make = self.server.files.get(name)
        if make is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such file here")
        return _TYPES[name[name.rindex(".") :]], make()

    def _solution(self) -> tuple[str, str]:
        if self.path != "/solve":
            raise _Refused(HTTPStatus.NOT_FOUND, "questions go to /solve")
        origin = self.headers.get("Origin")
        if origin is not None and origin not in {f"http://{host}" for host in self.server.hosts}:
            raise _Refused(HTTPStatus.FORBIDDEN, "questions come from this server's own page")
        # No form of another page can send this type without asking first, and then it is refused.
        if self.headers.get_content_type() != "application/json":
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "questions are application/json")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "a question says its length")
        size = int(length.lstrip("0")[:10] or "0")  # ten digits say that it is too long; zeros before them, nothing
        if size > _LONGEST_REQUEST:
            self.close_connection = True
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a question has at most {_LONGEST_REQUEST} bytes")
        try:
            request = json.loads(self.rfile.read(size))
        except (ValueError, RecursionError):
            raise _Refused(HTTPStatus.BAD_REQUEST, "a question is JSON") from None
        try:
            return "application/json", json.dumps(self.server.solver.solve(request), allow_nan=False)
        except FewbitError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, str(error)) from None
        except Busy:
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, "still solving the table before; try again") from None
