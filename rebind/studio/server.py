"""Run the studio: take a port, answer until it is stopped, and leave the model in order."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable

import uvicorn

from rebind.errors import InputError
from rebind.studio.app import create_app
from rebind.studio.security import Access, is_local
from rebind.studio.state import Studio

SHORTEST_TOKEN = 16


def require_token(host: str, token: str | None) -> str:
    """Return the token that requests need: none on this machine alone, a new one elsewhere if none was given."""
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise InputError(
            f"The token has {len(token)} characters",
            expected=f"{SHORTEST_TOKEN} or more, without accents",
            advice="Leave it out, and the studio makes one",
            code="weak_token",
        )
    return token or ("" if is_local(host) else secrets.token_urlsafe(24))


def open_socket(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded; port 0 takes a free one."""
    listener = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except (OSError, UnicodeError) as problem:  # a name that no host can have
        if listener is not None:
            listener.close()
        raise InputError(
            f"The studio cannot listen at {host}:{port} ({getattr(problem, 'strerror', None) or problem})",
            advice="Stop what uses the port, or choose another {port}",
            settings={"port": port + 1 if port else None},
            code="port_unavailable",
        ) from None
    return listener


def page_address(host: str, listener: socket.socket, token: str) -> str:
    """Return the link to the page."""
    port = listener.getsockname()[1]
    name = "127.0.0.1" if host in ("0.0.0.0", "::", "localhost") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def serve(
    studio: Studio,
    listener: socket.socket,
    host: str,
    token: str,
    when_ready: Callable[[], None] = lambda: None,
    give_stop: Callable[[Callable[[], None]], None] = lambda stop: None,
) -> None:
    """Answer requests until Ctrl-C; then let the worker leave the model in order.

    `give_stop` receives a function that ends the server from another thread.
    """
    access = Access.at(host, listener.getsockname()[1], token)
    config = uvicorn.Config(
        create_app(studio, access),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=1,
        limit_concurrency=200,
    )
    server = _AnnouncingServer(config, when_ready)
    give_stop(lambda: setattr(server, "should_exit", True))
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # how a server is stopped
    finally:
        listener.close()
        studio.close()


class _AnnouncingServer(uvicorn.Server):
    """A server that says when it answers."""

    def __init__(self, config: uvicorn.Config, when_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._when_ready = when_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._when_ready()
