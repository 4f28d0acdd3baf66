import http.client
import json
import threading

import fewbit
import numpy as np
import pytest
from fewbit.fewbit_gen import solve
from fewbit.pages.server import ExplorerServer
from fewbit.pages.solver_process import SolverProcess, answer
from fewbit.tables.table import table_from_dict

QUESTION = {"activation": "x*sigmoid(1.702*x)", "kind": "shared", "weight": "uniform:-10,10", "bits": 2}


@pytest.fixture(scope="module")
def server():
    with SolverProcess() as solver, ExplorerServer(0, solver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(server, method, path, body=None, **headers):
    """Send one request, with the headers of a browser unless others are given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    usual = {"Host": f"127.0.0.1:{server.server_port}", "Content-Type": "application/json"}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    content = body if isinstance(body, str | bytes | None) else json.dumps(body)
    connection.request(method, path, content, {k: v for k, v in {**usual, **given}.items() if v is not None})
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply, text


def error(text):
    """The one line of a refusal."""
    line = json.loads(text)["error"]
    assert line and "\n" not in line and "Traceback" not in line
    return line


def test_it_listens_on_the_loopback_address_alone(server):
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("path", ["/", "/index.html", "/?x=1", "/base.css", "/data/index.js", "/data/relu.js"])
def test_the_site_is_served(server, path):
    reply, text = ask(server, "GET", path)
    assert (reply.status, bool(text)) == (200, True)
    assert reply.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert reply.headers["X-Content-Type-Options"] == "nosniff"


def test_a_head_request_has_no_body(server):
    reply, text = ask(server, "HEAD", "/")
    assert (reply.status, text) == (200, "")


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/..%2fserver.py", "//etc/passwd", "/data/../../server.py", "/data/", "/data/gelu.json", "/\x01"],
)
def test_no_path_leads_to_a_file(server, path):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection._validate_path = lambda _: None  # http.client refuses to send some of these
    connection.request("GET", path)
    reply = connection.getresponse()
    assert reply.status in (400, 404)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "localhost", "0.0.0.0:80", ""])
@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("POST", "/solve")])
def test_another_host_is_refused(server, host, method, path):
    reply, text = ask(server, method, path, QUESTION if method == "POST" else None, Host=host)
    assert reply.status == 403 and server.url in error(text)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_a_question_of_another_page_is_refused(server, origin):
    reply, text = ask(server, "POST", "/solve", QUESTION, Origin=origin)
    assert reply.status == 403 and error(text)
    assert "Access-Control-Allow-Origin" not in reply.headers


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_a_form_cannot_ask(server, kind):
    reply, text = ask(server, "POST", "/solve", QUESTION, Content_Type=kind)
    assert reply.status == 415 and error(text)


def test_a_question_gets_the_table_that_solve_gives(server):
    reply, text = ask(server, "POST", "/solve", QUESTION, Origin=f"http://127.0.0.1:{server.server_port}")
    assert reply.status == 200
    found = json.loads(text)
    expected = solve(QUESTION["activation"], bits=2)
    assert found["name"] == expected.activation
    assert table_from_dict(json.loads(found["sources"]["json"])).key == expected.key
    assert found["table"]["error"] == expected.error
    assert found["weight"]["spec"] == "uniform:-10,10"


def test_a_question_with_a_histogram_of_inputs(server):
    edges, counts = [-2.0, -1.0, 0.0, 1.0, 3.0], [1, 4, 5, 2]
    asked = {**QUESTION, "inputs": {"edges": edges, "counts": counts}}
    reply, text = ask(server, "POST", "/solve", asked)
    assert reply.status == 200
    inputs = json.loads(text)["weight"]
    assert np.interp(0.0, inputs["x"], inputs["share"]) == pytest.approx(5 / 12, abs=1e-3)


HOSTILE = {
    "a call": {"activation": "__import__('os').system('true')"},
    "an attribute": {"activation": "x.__class__"},
    "a comprehension": {"activation": "[x for x in (1,)]"},
    "a lambda": {"activation": "(lambda: x)()"},
    "a tower of powers": {"activation": "x*9**9**9**9"},
    "no text": {"activation": 3},
    "nothing": {"activation": ""},
    "a long one": {"activation": "x+" * 600 + "x"},
    "a deep one": {"activation": "(" * 400 + "x" + ")" * 400},
    "many functions": {"activation": "sin(" * 70 + "x" + ")" * 70},
    "control characters": {"activation": "gelu\x00\n"},
    "a file of this machine": {"weight": "/etc/passwd.txt"},
    "a file in a mixture": {"weight": "0.5*samples.npy"},
    "a long weight": {"weight": "+".join(["0.1*normal:0,1"] * 60)},
    "no weight": {"weight": None},
    "no distribution": {"weight": "uniform:1,-1"},
    "many bits": {"bits": 9},
    "bits as text": {"bits": "3"},
    "true bits": {"bits": True},
    "another kind": {"kind": "best"},
    "a kind in a list": {"kind": ["shared"]},
    "inputs as text": {"inputs": "samples.npy"},
    "inputs without counts": {"inputs": {"edges": [0, 1]}},
    "inputs that are no numbers": {"inputs": {"edges": ["0", None], "counts": [1]}},
    "inputs of no share": {"inputs": {"edges": [0, 1], "counts": [0]}},
    "too many inputs": {"inputs": {"edges": list(range(1502)), "counts": [1] * 1501}},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_hostile_questions_get_one_line(server, change):
    reply, text = ask(server, "POST", "/solve", {**QUESTION, **change})
    assert reply.status == 400
    assert len(error(text)) < 1000


@pytest.mark.parametrize("body", ["", "{", "[" * 50_000, "3", "null", "[]", '"x"', b"\xff\xfe", "{}"])
def test_what_is_no_question_gets_one_line(server, body):
    reply, text = ask(server, "POST", "/solve", body)
    assert reply.status == 400 and error(text)


def test_a_question_has_a_size(server):
    reply, text = ask(server, "POST", "/solve", {**QUESTION, "activation": "x" * 70_000})
    assert reply.status == 413 and error(text)


@pytest.mark.parametrize(
    ("length", "status"),
    [
        *(("-1", 411), ("1e3", 411), ("²", 411)),
        # Their first ten digits are 0: each was read in full, however long it is.
        *(("0" * 12 + "2", 400), ("0" * 12 + "9" * 12, 413), ("0" * 5000, 400)),
    ],
)
def test_a_question_says_its_length_in_digits_of_which_zeros_before_change_nothing(server, length, status):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest("POST", "/solve")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", length.encode("latin-1"))
    connection.endheaders(b"[]" if status != 411 else None)
    assert connection.getresponse().status == status


def test_on_the_port_of_http_browsers_leave_the_port_out(server, monkeypatch):
    monkeypatch.setattr(server, "server_port", 80)
    assert set(server.hosts) == {"127.0.0.1:80", "localhost:80", "127.0.0.1", "localhost"}


def test_other_paths_take_no_questions(server):
    assert ask(server, "POST", "/", QUESTION)[0].status == 404
    assert ask(server, "PUT", "/solve", QUESTION)[0].status == 501


def test_a_port_in_use_is_one_line(server):
    with pytest.raises(fewbit.FewbitError, match=f"cannot listen on port {server.server_port}"):
        ExplorerServer(server.server_port, server.solver)


# ---- the process behind it -------------------------------------------------------------------------------------------


@pytest.mark.deep
def test_what_takes_too_long_ends_and_the_next_question_is_answered():
    with SolverProcess(deadline=0.0) as solver:
        with pytest.raises(fewbit.FewbitError, match="takes more than 0 seconds"):
            solver.solve({**QUESTION, "bits": 8})
        solver._deadline = 60.0
        assert solver.solve(QUESTION)["table"]["bits"] == 2


@pytest.mark.deep
def test_a_process_that_dies_is_replaced():
    with SolverProcess() as solver:
        assert solver.solve(QUESTION)
        solver._process.kill()
        with pytest.raises(fewbit.FewbitError, match="too much"):
            solver.solve(QUESTION)
        assert solver.solve(QUESTION)


def test_two_questions_at_once_are_refused(server):
    with server.solver._one_at_a_time:
        reply, text = ask(server, "POST", "/solve", QUESTION)
    assert reply.status == 503 and "try again" in error(text)


def test_no_process_is_left_behind():
    with SolverProcess() as solver:
        process = solver._process
    assert not process.is_alive()


def test_the_answer_is_what_json_can_hold():
    found = answer({**QUESTION, "activation": "log(x)", "weight": "uniform:0.5,2"})
    assert json.dumps(found, allow_nan=False)
