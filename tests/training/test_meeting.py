"""How processes meet, and who cannot keep them from it."""

import contextlib
import hmac
import socket
import threading
import time
from typing import Any

import pytest
from free_ports import free_port

from mhe_jax.config import InputError
from mhe_jax.training.cluster import meeting
from mhe_jax.training.cluster.meeting import _proof, meet


@pytest.fixture(autouse=True)
def long_greetings(monkeypatch):
    """Who is dropped, is dropped for another reason than his time."""
    monkeypatch.setattr(meeting, "GREETING", 60)


@contextlib.contextmanager
def coming(arrivals, timeout=20.0, port=None):
    """The port, and what becomes of processes (index, their count) once the block has ended."""
    port = port or free_port()
    outcomes: list[Any] = [None] * len(arrivals)

    def come(i, index, count):
        try:
            meet(f"localhost:{port}", count, index, timeout)
        except InputError as error:
            outcomes[i] = str(error)

    threads = [
        threading.Thread(target=come, args=(i, *arrival)) for i, arrival in enumerate(arrivals)
    ]
    for thread in threads:
        thread.start()
    yield port, outcomes
    for thread in threads:
        thread.join()


def met(arrivals, **options):
    with coming(arrivals, **options) as (_, outcomes):
        pass
    return outcomes


def connect(port, address="127.0.0.1"):
    end = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((address, port), timeout=20)
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.02)


def is_dropped(stranger):
    """Whether the other side has closed it, after its own line."""
    with contextlib.suppress(ConnectionResetError):
        while part := stranger.recv(4096):
            assert part.startswith(b"mhe_jax ")
    return True


def nonce_of(stranger):
    return stranger.makefile("rb").readline().decode().split()[1]


@pytest.mark.parametrize("token", [None, "a secret of ours"])
def test_all_come(monkeypatch, token):
    if token:
        monkeypatch.setenv("MHE_JAX_TOKEN", token)
    assert met([(2, 3), (0, 3), (1, 3)]) == [None] * 3


def test_those_that_do_not_come_are_named_to_all_that_do():
    told = met([(0, 4), (2, 4)], timeout=1.5)
    assert told == ["processes 1, 3 of 4 did not come within 2 s"] * 2


def test_nobody_at_the_coordinator():
    (told,) = met([(1, 2)], timeout=0.5)
    assert told.startswith("process 0 did not answer at localhost:")


def test_two_with_one_number():
    assert met([(0, 3), (1, 3), (1, 3)]) == ["two processes have --process_id 1"] * 3


def test_two_counts():
    assert met([(0, 3), (1, 5)]) == ["process 1 has --num_processes 5, process 0 has 3"] * 2


def test_one_that_left_comes_again():
    with coming([(0, 3)]) as (port, outcomes):
        with connect(port) as first:
            nonce = nonce_of(first)
            first.sendall(f"mhe_jax 1 3 x {_proof('greeting', nonce, '1 3 x')}\n".encode())
            time.sleep(0.1)
        assert met([(1, 3), (2, 3)], port=port) == [None] * 2
    assert outcomes == [None]


# What strangers say; {} is the proof of those who know the way, but no token.
SAYINGS = [
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"mhe_jax 1 3\n",
    b"mhe_jax 1 3 x y z\n",
    b"mhe_jax 0 3 x PROOF\n",
    b"mhe_jax 3 3 x PROOF\n",
    b"mhe_jax 7 3 x PROOF\n",
    b"mhe_jax -1 3 x PROOF\n",
    b"mhe_jax 1_0 13 x PROOF\n",
    b"mhe_jax \xd9\xa1 3 x PROOF\n",
    b"mhe_jax 1 99999999999999999999 x PROOF\n",
    b"mhe_jax \xff\xfe 3 x PROOF\n",
    b"x" * 5000,
    b"",
]


def test_strangers_are_dropped_and_nobody_waits_for_them():
    with coming([(0, 3)], timeout=60.0) as (port, outcomes), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(port)) for _ in range(20)]
        slow = stack.enter_context(connect(port))
        slow.sendall(b"mhe_jax 1")
        for saying in SAYINGS:
            with connect(port) as stranger:
                nonce = nonce_of(stranger)
                said = saying.replace(b"mhe_jax ", b"").replace(b" PROOF\n", b"")
                proof = _proof("greeting", nonce, said.decode(errors="replace")).encode()
                stranger.sendall(saying.replace(b"PROOF", proof))
                if not saying:
                    stranger.shutdown(socket.SHUT_WR)
                assert is_dropped(stranger), saying
        begin = time.monotonic()
        assert met([(1, 3), (2, 3)], port=port) == [None] * 2
        assert time.monotonic() - begin < 5
        assert all(each.fileno() >= 0 for each in silent)
    assert outcomes == [None]


def test_who_has_no_token_cannot_end_the_start(monkeypatch):
    monkeypatch.setenv("MHE_JAX_TOKEN", "ours")
    with coming([(0, 2)]) as (port, outcomes):
        with connect(port) as stranger:
            said = f"greeting {nonce_of(stranger)} 1 5 x".encode()
            proof = hmac.digest(b"", said, "sha256").hex()
            stranger.sendall(f"mhe_jax 1 5 x {proof}\n".encode())
            assert is_dropped(stranger)
        meet(f"localhost:{port}", 2, 1, 20.0)
    assert outcomes == [None]


def test_a_proof_is_of_one_nonce_and_never_the_token(monkeypatch):
    monkeypatch.setenv("MHE_JAX_TOKEN", "ours")
    assert _proof("greeting", "a", "1 2 x") != _proof("greeting", "b", "1 2 x")
    assert "ours" not in _proof("greeting", "a", "1 2 x")
    with coming([(0, 2)], timeout=1.0) as (port, outcomes):
        with connect(port) as first:
            said = f"mhe_jax 1 2 x {_proof('greeting', nonce_of(first), '1 2 x')}\n".encode()
        with connect(port) as again:
            again.sendall(said)
            assert is_dropped(again)
    assert outcomes == [
        "process 1 of 2 did not come within 1 s; greetings under another MHE_JAX_TOKEN: 1"
    ]


def test_an_answer_without_the_token_is_none():
    """Whoever took the port first cannot tell us that our job is over."""
    with socket.create_server(("127.0.0.1", free_port())) as other:
        said = []

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = other.accept()
                    with connection:
                        connection.sendall(b"mhe_jax abc\n")
                        said.append(connection.recv(300))
                        connection.sendall(b"0123 two processes have --process_id 1\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(InputError) as error:
            meet(f"127.0.0.1:{other.getsockname()[1]}", 2, 1, 0.7)
        other.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert said
    assert "process 0 did not answer at" in str(error.value)
    assert str(error.value).endswith("is MHE_JAX_TOKEN the same everywhere?")


def test_a_greeting_is_no_answer(monkeypatch):
    """Whoever took the port has one process say to him what he then says to another."""
    monkeypatch.setenv("MHE_JAX_TOKEN", "ours")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        end, told = time.monotonic() + 20, []
        thread = threading.Thread(target=lambda: told.append(meeting._greet(ours, 1, 3, end)))
        thread.start()
        theirs.sendall(b"mhe_jax abc\n")
        nonce = theirs.makefile("rb").readline().split()[3].decode()
        other, stranger = socket.socketpair()
        with other, stranger:
            stranger.sendall(f"mhe_jax {nonce}\n".encode())
            stranger.shutdown(socket.SHUT_WR)
            meeting._greet(other, 2, 3, end)
            _, *said, proof = stranger.makefile("rb").readline().decode().split()
        theirs.sendall(f"{proof} {' '.join(said)}\n".encode())
        thread.join()
    assert told == [""]


def test_who_answers_a_little_at_a_time_holds_nobody_longer():
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def trickle():
        while not over.wait(0.03):
            theirs.sendall(b"m")

    thread = threading.Thread(target=trickle)
    with ours, theirs:
        thread.start()
        begin = time.monotonic()
        try:
            with pytest.raises(TimeoutError):
                meeting._greet(ours, 1, 3, begin + 0.4)
        finally:
            over.set()
            thread.join()
    assert time.monotonic() - begin < 3


def test_too_many_at_the_door(monkeypatch):
    """The oldest goes, and ours come in."""
    monkeypatch.setattr(meeting, "STRANGERS", 3)
    with coming([(0, 2)]) as (port, outcomes), contextlib.ExitStack() as stack:
        many = [stack.enter_context(connect(port)) for _ in range(11)]
        assert is_dropped(many[0])
        meet(f"localhost:{port}", 2, 1, 20.0)
    assert outcomes == [None]


def test_a_greeting_takes_no_longer_than_it_may(monkeypatch):
    monkeypatch.setattr(meeting, "GREETING", 0.2)
    with coming([(0, 2)]) as (port, outcomes):
        with connect(port) as stranger:
            stranger.sendall(b"mhe_jax 1 2")
            assert is_dropped(stranger)
        meet(f"localhost:{port}", 2, 1, 20.0)
    assert outcomes == [None]


def listening(host):
    """Addresses at which process 0 listens for `host`, and whether that is all it listens at."""
    servers, named = meeting._servers(host, free_port(), 2)
    heard = {server.getsockname()[0] for server in servers}
    for server in servers:
        server.close()
    return heard, named


def test_it_listens_at_the_address_that_is_named():
    assert listening("127.0.0.1") == ({"127.0.0.1"}, True)
    heard, named = listening("localhost")
    assert named
    assert heard <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("host", ["203.0.113.7", "host", "nowhere.invalid"])
def test_it_listens_everywhere_where_others_may_look_elsewhere(monkeypatch, host):
    """Behind an address translation, and for a name, which may be another address to others."""

    def looked_up(name, port, *arguments, flags=0, **options):
        if name != "host" or flags & socket.AI_NUMERICHOST:
            return look_up(name, port, *arguments, flags=flags, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("0.0.0.0", port))]

    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    heard, named = listening(host)
    assert not named
    assert heard <= {"::", "0.0.0.0"}


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of the coordinator: Address already"):
            meet(f"localhost:{port}", 2, 0, 1.0)
