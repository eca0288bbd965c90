"""How the processes of a job meet: all greet process 0 at the coordinator's port.

`jax.distributed` alone would abort without naming who did not come. Process 0 sends
`mhe_jax NONCE` to each connection, and is greeted by `mhe_jax INDEX COUNT NONCE PROOF`. When all
have connected, it answers `PROOF TEXT`.

A proof is an HMAC under the token of the job, MHE_JAX_TOKEN. It covers the role of the sender, the
other's nonce, and the message. The token itself is never sent. Without a token anybody can make
a proof. A connection with another greeting is dropped, and delays no other.
"""

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from typing import cast

from mhe_jax.config import InputError

# The longest line and answer, the seconds a greeting may take, and how many connections that have
# not greeted may wait at once, besides those that are to come.
LINE, ANSWER, GREETING, STRANGERS = 300, 1 << 16, 10, 100


def meet(coordinator: str, count: int, index: int, timeout: float) -> bool:
    """Returns in all processes once all have come; process 0 waits at the coordinator's port.

    Returns:
      Whether process 0, which this is, listens at the coordinator's address alone.

    Raises:
      InputError: in all that came, naming those that did not; the port is taken; two processes
        have one number, or differ in how many there are.
    """
    host, _, port = coordinator.rpartition(":")
    address, deadline = (host.strip("[]"), int(port)), time.monotonic() + timeout
    if index == 0:
        servers, named = _servers(*address, count + STRANGERS)
        _Reception(servers, count).hold(deadline, timeout)
        return named
    closed = ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as to_first:
                # Process 0 has the same deadline; this leaves it time to name those missing.
                answer = _greet(to_first, index, count, deadline + 10)
            if answer == "go":
                return False
            if answer:
                raise InputError(answer)
            closed = (
                "; something is there but does not answer: is MHE_JAX_TOKEN the same everywhere?"
            )
        except socket.gaierror as error:
            raise InputError(f"--coordinator {coordinator}: {error.strerror}") from None
        except OSError:  # it is not there yet
            pass
        time.sleep(0.2)
    raise InputError(f"process 0 did not answer at {coordinator} within {timeout:.0f} s{closed}")


def _greet(to_first: socket.socket, index: int, count: int, end: float) -> str:
    """The answer of process 0; empty if that is somebody else."""
    mine = secrets.token_hex(16)
    theirs = _words(_line(to_first, LINE, end), 2)
    if theirs[0] != "mhe_jax":
        return ""
    said = f"{index} {count} {mine}"
    to_first.sendall(f"mhe_jax {said} {_proof('greeting', theirs[1], said)}\n".encode())
    proof, _, answer = _line(to_first, ANSWER, end).decode(errors="replace").strip().partition(" ")
    wanted = _proof("answer", mine, answer)
    return answer if hmac.compare_digest(proof.encode(), wanted.encode()) else ""


def _line(connection: socket.socket, longest: int, end: float) -> bytes:
    """One line as it was sent; process 0 waits for us after each of its own.

    Raises:
      TimeoutError: the line is not complete by `end`, however slowly it comes.
    """
    line = b""
    while not line.endswith(b"\n") and len(line) < longest:
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        if not (part := connection.recv(longest - len(line))):
            break
        line += part
    return line


def _proof(*parts: str) -> str:
    token = os.environ.get("MHE_JAX_TOKEN", "")
    return hmac.digest(os.fsencode(token), " ".join(parts).encode(), "sha256").hex()


def _words(line: bytes, count: int) -> list[str]:
    """The words of a whole line if there are `count` of them, else `count` empty ones."""
    words = line.decode(errors="replace").split() if line.endswith(b"\n") else []
    return words if len(words) == count else [""] * count


def _servers(host: str, port: int, backlog: int) -> tuple[list[socket.socket], bool]:
    """Listens at `host` if that is localhost or an address of ours; returns whether it is.

    Otherwise listens at all addresses: others may look up a name as another address than we do, and
    behind an address translation none is ours.
    """
    flags = 0 if host == "localhost" else socket.AI_NUMERICHOST  # looks up no name
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except OSError:
        found = []
    addresses = dict.fromkeys((family, where) for family, *_, where in found)
    servers: list[socket.socket] = []
    try:
        for family, where in addresses:
            with contextlib.suppress(_NotOurs):
                servers.append(_listen(family, where, backlog))
        if servers:
            return servers, True
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return [_listen(family, ("", port), backlog, dual)], False
    except OSError as error:
        for server in servers:
            server.close()
        raise InputError(f"port {port} of the coordinator: {error.strerror}") from None


class _NotOurs(Exception):
    """An address of another machine."""


def _listen(family: int, where: tuple, backlog: int, dual: bool = False) -> socket.socket:
    try:
        return socket.create_server(where, family=family, backlog=backlog, dualstack_ipv6=dual)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise _NotOurs from None
        raise


class _Reception:
    """Process 0, which all others greet; no connection waits for another."""

    def __init__(self, servers: list[socket.socket], count: int):
        self._servers, self._count = servers, count
        self._present: dict[int, tuple[socket.socket, str]] = {}
        # Those that have not greeted: nonce, what was sent so far, and the deadline.
        self._coming: dict[socket.socket, tuple[str, bytes, float]] = {}
        self._strangers = 0

    def hold(self, deadline: float, timeout: float) -> None:
        """Waits until all are there.

        Raises:
          InputError: what `meet` says.
        """
        try:
            with selectors.DefaultSelector() as self._selector:
                for server in self._servers:
                    server.setblocking(False)
                    self._selector.register(server, selectors.EVENT_READ)
                self._wait(deadline, timeout)
            self._answer("go")
        except InputError as error:
            self._answer(str(error))
            raise
        finally:
            for each in (*self._servers, *self._coming, *(s for s, _ in self._present.values())):
                each.close()

    def _wait(self, deadline: float, timeout: float) -> None:
        while len(self._present) < self._count - 1:
            now = time.monotonic()
            if now > deadline:
                missing = [p for p in range(1, self._count) if p not in self._present]
                reason = f"{names(missing)} of {self._count} did not come within {timeout:.0f} s"
                if self._strangers:
                    reason += f"; greetings under another MHE_JAX_TOKEN: {self._strangers}"
                raise InputError(reason)
            for late in [each for each, (_, _, until) in self._coming.items() if now > until]:
                self._drop(late)
            for key, _ in self._selector.select(min(0.5, max(deadline - now, 0.001))):
                ready = cast(socket.socket, key.fileobj)
                if ready in self._servers:
                    self._accept(ready)
                elif ready.fileno() >= 0:  # not dropped by now
                    self._hear(ready)

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, _ = server.accept()
        except OSError:  # it has left
            return
        connection.setblocking(False)
        if len(self._coming) >= self._count + STRANGERS:
            self._drop(next(iter(self._coming)))  # the oldest
        nonce = secrets.token_hex(16)
        self._coming[connection] = nonce, b"", time.monotonic() + GREETING
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            connection.send(f"mhe_jax {nonce}\n".encode())
        except OSError:
            self._drop(connection)

    def _hear(self, connection: socket.socket) -> None:
        try:
            part = connection.recv(LINE)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        nonce, line, until = self._coming.get(connection, ("", b"", 0.0))
        line += part
        if not part or not nonce or len(line) > LINE:  # one that is present has no more to say
            self._drop(connection)
        elif line.endswith(b"\n"):
            self._judge(connection, nonce, line)
        else:
            self._coming[connection] = nonce, line, until

    def _judge(self, connection: socket.socket, nonce: str, line: bytes) -> None:
        name, first, second, theirs, proof = _words(line, 5)
        good = all(n.isascii() and n.isdecimal() and len(n) < 10 for n in (first, second))
        if name != "mhe_jax" or not good or not 0 < int(first) < int(second):
            self._drop(connection)
            return
        wanted = _proof("greeting", nonce, f"{first} {second} {theirs}")
        if not hmac.compare_digest(proof.encode(), wanted.encode()):
            self._strangers += 1
            self._drop(connection)
            return
        index, count = int(first), int(second)
        reason = ""
        if count != self._count:
            reason = f"process {index} has --num_processes {count}, process 0 has {self._count}"
        elif index in self._present:
            reason = f"two processes have --process_id {index}"
        if reason:
            self._say(connection, theirs, reason)
            raise InputError(reason)
        del self._coming[connection]
        self._present[index] = connection, theirs

    def _drop(self, connection: socket.socket) -> None:
        self._coming.pop(connection, None)
        self._present = {p: s for p, s in self._present.items() if s[0] is not connection}
        self._selector.unregister(connection)
        connection.close()

    def _answer(self, answer: str) -> None:
        for connection, nonce in self._present.values():
            self._say(connection, nonce, answer)

    def _say(self, connection: socket.socket, nonce: str, answer: str) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(f"{_proof('answer', nonce, answer)} {answer}\n".encode())


def names(processes: Sequence[int]) -> str:
    """The processes, as a message names them.

    >>> names([3]), names([1, 2])
    ('process 3', 'processes 1, 2')
    """
    word = "process" if len(processes) == 1 else "processes"
    return f"{word} {', '.join(map(str, processes))}"
