"""Requests that are refused, whatever they ask for, and the headers of every answer."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from rebind.errors import InputError
from rebind.studio import Access, Studio, create_app
from rebind.studio.app import TABS
from rebind.studio.security import HEADERS, Gate
from rebind.studio.server import open_socket, page_address, require_token

PORT = 7860
TOKEN = "a-token-of-some-length"


def no_editor(name):
    raise InputError("There is no model", code="model_not_found")


@pytest.fixture
def bare(tmp_path):
    """A studio without a model: the gate stands in front of it all the same."""
    studio = Studio(no_editor, model="none", export_folder=tmp_path)
    yield studio
    studio.close()


def client_of(studio, **access):
    return TestClient(create_app(studio, Access(PORT, **access)), base_url=f"http://127.0.0.1:{PORT}")


def all_routes(studio):
    common = [("GET", "/"), ("GET", "/api/state"), ("POST", "/api/model"), ("GET", "/api/jobs/j1")]
    common += [("POST", "/api/jobs/j1/cancel"), ("GET", "/static/studio.js"), ("GET", "/nowhere")]
    tabs = [route for tab in TABS.values() for route in tab(studio)]
    return common + [(method, route.path) for route in tabs for method in route.methods - {"HEAD"}]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": f"evil.example:{PORT}"},
        {"host": "127.0.0.1:9999"},
        {"host": "127.0.0.1"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": f"https://127.0.0.1:{PORT}"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_pages_are_refused_on_every_route(bare, headers):
    client = client_of(bare)
    for method, path in all_routes(bare):
        answer = client.request(method, path, headers=headers, json={} if method == "POST" else None)
        assert answer.status_code == 403, (method, path)
        assert answer.json()["code"] in ("wrong_host", "wrong_origin")
    assert not bare.jobs.unfinished


def test_the_studios_own_page_is_answered(bare):
    client = client_of(bare)
    own = {"origin": f"http://localhost:{PORT}", "host": f"localhost:{PORT}", "sec-fetch-site": "same-origin"}
    assert client.get("/api/state", headers=own).status_code == 200
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/", headers=link).status_code == 200, "a link to the page may be followed"
    assert client.get("/api/state", headers=link).status_code == 403


def test_every_answer_has_the_headers(bare):
    client = client_of(bare)
    for answer in (
        client.get("/"),
        client.get("/static/studio.css"),
        client.get("/nowhere"),
        client.get("/api/state", headers={"host": "evil.example"}),
        client.delete("/api/state"),
    ):
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


def test_the_page_has_no_inline_script_and_names_no_other_host(bare):
    client = client_of(bare)
    page = client.get("/").text
    assert "<script>" not in page
    assert " style=" not in page
    assert "http" not in page
    assert "onclick" not in page


def test_unexpected_errors_have_the_headers_and_no_traceback(bare):
    app = create_app(bare, Access(PORT))
    bare.jobs.get = lambda id: 1 / 0
    answer = TestClient(app, base_url=f"http://127.0.0.1:{PORT}", raise_server_exceptions=False).get("/api/jobs/j1")
    assert answer.status_code == 500
    assert answer.json()["code"] == "internal_error"
    assert "Traceback" not in answer.text
    assert answer.headers["X-Frame-Options"] == "DENY"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_post_needs_json(bare, kind):
    answer = client_of(bare).post("/api/model", content=b'{"model": "x"}', headers={"content-type": kind})
    assert answer.status_code == 415


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_are_refused(bare, method):
    assert client_of(bare).request(method, "/api/state").status_code == 405


def test_large_requests_are_refused(bare):
    app = create_app(bare, Access(PORT))
    app.largest_request = 100
    client = TestClient(app, base_url=f"http://127.0.0.1:{PORT}")
    json = {"content-type": "application/json"}
    assert client.post("/api/model", content=b"x" * 101, headers=json).status_code == 413

    def unannounced():
        yield b"x" * 60
        yield b"x" * 60

    assert client.post("/api/model", content=unannounced(), headers=json).status_code == 413


def test_a_token_is_needed_on_every_route(bare):
    client = client_of(bare, token=TOKEN)
    for method, path in all_routes(bare):
        answer = client.request(method, path, json={} if method == "POST" else None)
        assert answer.status_code == 401, (method, path)
    wrong = {"authorization": "Bearer wrong"}
    assert client.get("/api/state", headers=wrong).status_code == 401
    assert client.get("/api/state", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert client.get(f"/api/state?token={TOKEN}").status_code == 401, "only the page takes it from the address"


def test_the_link_with_the_token_lets_a_browser_in(bare):
    client = client_of(bare, token=TOKEN)
    answer = client.get(f"/?token={TOKEN}", follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/api/state").status_code == 200
    assert client.get("/?token=wrong").status_code == 401


def test_listening_elsewhere_needs_a_token():
    assert require_token("127.0.0.1", None) == ""
    assert len(require_token("0.0.0.0", None)) >= 32
    assert require_token("0.0.0.0", None) != require_token("0.0.0.0", None)
    assert require_token("0.0.0.0", TOKEN) == TOKEN
    with pytest.raises(InputError) as caught:
        require_token("0.0.0.0", "short")
    assert caught.value.code == "weak_token"


def test_names_and_numbers_of_a_server_that_others_can_reach():
    access = Access.at("0.0.0.0", PORT, TOKEN)
    assert access.allows_host(f"192.168.1.7:{PORT}")
    assert access.allows_host(f"127.0.0.1:{PORT}")
    assert not access.allows_host(f"evil.example:{PORT}")
    assert not Access.at("127.0.0.1", PORT).allows_host(f"192.168.1.7:{PORT}")


def test_a_port_that_is_taken():
    with open_socket("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        assert page_address("0.0.0.0", listener, TOKEN) == f"http://127.0.0.1:{port}/?token={TOKEN}"
        with pytest.raises(InputError) as caught:
            open_socket("127.0.0.1", port)
    assert caught.value.code == "port_unavailable"


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd"])
def test_only_static_files_are_served(bare, path):
    assert client_of(bare).get(path).status_code == 404


def test_the_gate_refuses_web_sockets(bare):
    app = create_app(bare, Access(PORT))
    assert isinstance(app, Gate)
    with pytest.raises(RuntimeError), TestClient(app).websocket_connect("/"):
        pass
