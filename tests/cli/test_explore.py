import json
import os
import signal
import socket
import subprocess
import urllib.request
from functools import partial

import pytest


def test_the_page_is_written_to_a_folder(run, tmp_path, monkeypatch):
    monkeypatch.setattr("fewbit.pages.explorer_site.shipped_activations", lambda: ("relu",))
    outcome = run("explore", "-o", tmp_path / "site")
    assert (outcome.status, outcome.out) == (0, "")
    assert outcome.err == f"wrote {tmp_path / 'site' / 'index.html'}\n"
    assert (tmp_path / "site" / "data" / "relu.js").stat().st_size > 1000


def test_a_folder_that_cannot_be_made_is_one_line(run, tmp_path):
    (tmp_path / "file").write_text("")
    outcome = run("explore", "-o", tmp_path / "file" / "site")
    assert outcome.status == 2 and outcome.err.count("\n") == 1 and "cannot make the folder" in outcome.err


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_a_port_is_a_number(run, port):
    outcome = run("explore", "--port", port)
    assert outcome.status == 2 and outcome.err.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_it_serves_until_it_is_interrupted(command):
    process = subprocess.Popen(
        [*command, "explore", "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that run in the background ignore it, and so would their children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        url = process.stdout.readline().split()[0]
        with urllib.request.urlopen(url, timeout=60) as reply:
            assert b"Table explorer" in reply.read()
        question = json.dumps({"activation": "relu", "kind": "shared", "weight": "uniform:-1,1", "bits": 1}).encode()
        asked = urllib.request.Request(f"{url}solve", question, {"Content-Type": "application/json"})
        urllib.request.urlopen(asked, timeout=200).close()  # the process behind it has begun
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.communicate()


def test_a_port_in_use_is_one_line(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = run("explore", "--no-browser", "--port", port)
    assert outcome.status == 2
    assert outcome.err.startswith(f"fewbit: cannot listen on port {port}") and outcome.err.count("\n") == 1
