"""Which requests are refused, and the headers of every answer.

The studio changes models and writes files, so no other web page may drive it. A page elsewhere can make a browser send
requests to 127.0.0.1, directly or by letting its own name resolve to that address. Both show in headers that scripts
cannot forge: `Host`, `Origin` and `Sec-Fetch-Site`.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rebind.errors import FieldError
from rebind.studio.replies import problem

LARGEST_REQUEST = 16 * 2**20  # bytes: a file of 50,000 facts
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
SAME_SITE = ("same-origin", "none")  # "none": typed, or a bookmark

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


def is_local(host: str) -> bool:
    """Return whether only this machine can connect to an address.

    >>> is_local("127.0.0.1"), is_local("localhost"), is_local("0.0.0.0"), is_local("example.org")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Access:
    """Who may use the studio: the port and the names it is reached under, and the token that is needed, if any."""

    port: int
    token: str = ""
    names: Sequence[str] = LOCAL_NAMES
    any_address: bool = False  # also under the numeric addresses of this machine

    @classmethod
    def at(cls, host: str, port: int, token: str = "") -> Access:
        """Return the access of a server that listens at `host`."""
        if is_local(host):
            return cls(port, token)
        own = {socket.gethostname().lower(), f"{socket.gethostname().lower()}.local", host.lower()}
        return cls(port, token, (*LOCAL_NAMES, *sorted(own)), any_address=True)

    @property
    def cookie(self) -> str:
        return f"rebind_studio_{self.port}"  # cookies do not tell ports apart

    def allows_host(self, host: str) -> bool:
        """Return whether a Host header names this server. A number cannot be another site's name for it."""
        name, colon, port = host.lower().rpartition(":")
        if not colon or port != str(self.port):
            return self.port == 80 and self._allows_name(host.lower())
        return self._allows_name(name)

    def _allows_name(self, name: str) -> bool:
        if name in self.names:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return self.any_address

    def allows_token(self, token: str) -> bool:
        """Compare in constant time."""
        return not self.token or hmac.compare_digest(token.encode(), self.token.encode())


class Gate:
    """ASGI middleware in front of every route: refuses what is not the studio's own page."""

    def __init__(self, app: ASGIApp, access: Access, largest_request: int = LARGEST_REQUEST) -> None:
        self.app, self.access, self.largest_request = app, access, largest_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"The studio has no {scope['type']}")
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if (refusal := self._refusal(request)) is not None:
            await refusal(scope, receive, send_with_headers)
            return
        await self.app(scope, self._limited(receive), send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        headers, access = request.headers, self.access
        host = headers.get("host", "")
        if not access.allows_host(host):
            return _refuse(403, "This is not the address of the studio", "wrong_host")
        if not _is_own_origin(headers, host, is_page=request.url.path == "/" and request.method == "GET"):
            return _refuse(403, "Another web page may not use the studio", "wrong_origin")
        if not access.allows_token(_token_of(request, access)):
            return _refuse(401, "The studio needs its token: open the link that it printed", "wrong_token")
        if access.token and request.url.path == "/" and "token" in request.query_params:
            return _enter(request, access)
        if request.method not in ("GET", "HEAD", "POST"):
            return _refuse(405, f"The studio does not answer {request.method}", "wrong_method")
        if request.method == "POST":
            if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
                return _refuse(415, "The studio takes JSON", "not_json")
            length = headers.get("content-length", "0")
            if not length.isdecimal() or int(length) > self.largest_request:
                return _refuse(413, "The request is too large", "request_too_large")
        return None

    def _limited(self, receive: Receive) -> Receive:
        """Count the bytes that really come."""
        count = 0

        async def limited() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self.largest_request:
                raise HTTPException(413)
            return message

        return limited


def _is_own_origin(headers: Headers, host: str, *, is_page: bool) -> bool:
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host.lower()}":
        return False
    if headers.get("sec-fetch-site", "none") in SAME_SITE:
        return True
    return is_page and headers.get("sec-fetch-mode") == "navigate"  # a link to the page, which does nothing by itself


def _token_of(request: Request, access: Access) -> str:
    """Return the token of a request: a bearer token, the cookie, or the one in the link to the page."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    if request.url.path == "/" and "token" in request.query_params:
        return request.query_params["token"]
    try:
        morsel = SimpleCookie(request.headers.get("cookie", "")).get(access.cookie)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


def _enter(request: Request, access: Access) -> Response:
    """Put the token of the link into a cookie, and leave it out of the address from here on."""
    others = {name: values for name, values in parse_qs(request.url.query).items() if name != "token"}
    answer = RedirectResponse(f"/?{urlencode(others, doseq=True)}" if others else "/", 303)
    answer.set_cookie(access.cookie, access.token, httponly=True, samesite="strict")
    return answer


def _refuse(status: int, sentence: str, code: str) -> Response:
    return problem(FieldError(sentence, code=code), status)
