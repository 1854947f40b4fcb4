"""A client joins: a SuperNode that faces the network, a guard that holds the records, and a supervisor of both."""

from __future__ import annotations

import re
import secrets
import socket
import ssl
import time
from pathlib import Path
from typing import IO

from fairveil.deploy.folders import check_address, client_address
from fairveil.deploy.keys import public_key_mark
from fairveil.deploy.programs import Program, Tell, Told, new_text, require_flower, stopped_by_signals
from fairveil.store import hold, write_whole

GUARD = "fairveil.deploy.client"  # the module that runs as the guard's process
LONGEST_PAUSE = 30.0  # seconds between two attempts
STEADY = 60.0  # seconds after which what fails has not been failing all the time


def join(folder: Path, tell: Tell) -> None:
    """Take part in a federation until Ctrl-C or SIGTERM: whatever dies is started again.

    Args:
        tell: takes what the user should know, a line at a time; the same thing is told once.

    Raises:
        UserError: not a client's folder, a client runs there already, or a mistake in its data or policy.
    """
    require_flower()
    name, server = client_address(folder)
    with (folder / "lock").open("w") as lock:
        hold(lock, folder, "This client has joined already; two would spend its budget twice.")
        with stopped_by_signals(), (folder / "join.log").open("ab") as log:
            supervisor = _Supervisor(folder, name, server, log, tell)
            while True:
                supervisor.take_part()
        tell("Stopped.")


class _Supervisor:
    """Keeps a guard and a SuperNode running, with pauses that grow while they fail."""

    def __init__(self, folder: Path, name: str, server: str, log: IO[bytes], tell: Tell) -> None:
        self.folder, self.name, self.server, self.log, self.tell = folder, name, server, log, tell
        self.pause, self.told = 1.0, ""

    def take_part(self) -> None:
        """Start both, and return when one of them has ended and the other was stopped."""
        address = f"127.0.0.1:{_free_port()}"
        secret = self.folder / "door.secret"  # so that nobody else on this machine can take messages from the SuperNode
        write_whole(secret, secrets.token_bytes(32), mode=0o600)
        guard = self._guard(address, secret)
        node = None
        try:
            if self._opened(guard):  # its mistakes are told before anybody is met
                node = self._node(guard, address, secret)
            if node:
                started = time.monotonic()
                self._say(f"Joined {self.server}. Log: {self.folder}/join.log. Ctrl-C leaves.")
                _write(guard, b"joined\n")
                while not guard.ended and not node.ended:
                    time.sleep(0.2)
                which, code = ("guard", guard) if guard.ended else ("SuperNode", node)
                self._say(f"The {which} ended ({_how(code)}); starting again. {self.folder}/join.log says more.")
                self.pause = 1.0 if time.monotonic() - started > STEADY else self.pause
        finally:
            for program in (node, guard):
                if program:
                    program.stop()
            secret.unlink(missing_ok=True)
        time.sleep(self.pause)
        self.pause = min(2 * self.pause, LONGEST_PAUSE)

    def _guard(self, address: str, secret: Path) -> Program:
        """It works in the client's folder: the files and modules that client.toml and policy.toml name are there."""
        arguments = [GUARD, str(self.folder.resolve()), address, str(secret.resolve())]
        return Program(arguments, home=self.folder / "flower", log=self.log, cwd=self.folder, piped=True)

    def _opened(self, guard: Program) -> bool:
        """Whether the guard has read its data and its policy and found them in order."""
        assert guard.process.stdout is not None
        said = guard.process.stdout.readline().decode()
        if said == "open\n":
            return True
        rest = said + guard.process.stdout.read().decode()
        code = guard.process.wait()
        if code == 2:
            raise Told(rest.strip())
        self._say(f"The guard did not start ({_how(guard)}); trying again. {self.folder}/join.log says more.")
        return False

    def _node(self, guard: Program, address: str, secret: Path) -> Program | None:
        """A SuperNode that the server has taken in; None if the guard ended before."""
        host, port = address.split(":")
        command = [
            "fairveil.engine.flower", "supernode", "--root-certificates", str((self.folder / "ca.crt").resolve()),
            "--superlink", self.server, "--auth-supernode-private-key", str((self.folder / "node.key").resolve()),
            "--isolation", "process", "--superexec-auth-secret-file", str(secret.resolve()),
            "--host", host, "--port", port,
        ]  # fmt: skip
        pause = 1.0
        while not guard.ended:
            trouble = _unreachable(self.server, self.folder / "ca.crt")
            if trouble is None:
                start = self.log.seek(0, 2)
                node = Program(command, home=self.folder / "flower", log=self.log)
                try:
                    trouble = self._refused(node, start)
                except BaseException:
                    node.stop()
                    raise
                if trouble is None:
                    return node
                node.stop()
            self._say(f"{trouble}\n  Trying again until Ctrl-C.")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return None

    def _refused(self, node: Program, start: int) -> str | None:
        """Why the server does not take this client; None: it does."""
        while not node.ended:
            if "SuperNode ID:" in new_text(self.folder / "join.log", start):
                return None
            time.sleep(0.1)
        said = new_text(self.folder / "join.log", start)
        if "Failed to activate SuperNode" in said:  # Flower tells no more, and one answer for both
            return (
                f"{self.server} does not admit this client: it does not know the key "
                f"{public_key_mark(self.folder / f'{self.name}.pub')},\n"
                "  or still takes the client for present, as it does for half a minute after a crash.\n"
                f"  Send {self.folder}/{self.name}.pub to the server's keeper, if that was not done."
            )
        told = re.search(r"Exit Code: \d+\n(.*?)(\n\n|$)", said, re.DOTALL)
        why = told[1] if told else f"the SuperNode ended, {_how(node)}"
        return f"{self.server} could not be joined: {why}\n  {self.folder}/join.log says more."

    def _say(self, text: str) -> None:
        if text != self.told:
            self.tell(text)
        self.told = text


def _unreachable(server: str, authority: Path) -> str | None:
    """Why a TLS connection to the server cannot be made, in plain words; None: it can."""
    host, port = check_address(server, "server")
    try:
        context = ssl.create_default_context(cafile=authority)
        with socket.create_connection((host, port), 10) as raw, context.wrap_socket(raw, server_hostname=host):
            return None
    except ssl.SSLCertVerificationError as error:
        return (
            f"{server} is not the server of ca.crt: {error.verify_message}.\n"
            "  Nothing was sent. If the server was set up anew, get its new ca.crt; else somebody may stand in between."
        )
    except ssl.SSLError as error:
        return f"{server} does not answer with TLS ({error.reason}). Is it the right port?"
    except socket.gaierror:
        return f"{server} cannot be found: the name {host} is not known here."
    except OSError as error:
        return f"{server} cannot be reached: {error.strerror or error}. Is the server running?"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _write(program: Program, data: bytes) -> None:
    assert program.process.stdin is not None
    try:
        program.process.stdin.write(data)
        program.process.stdin.close()
    except BrokenPipeError:
        pass  # it has ended, which is noticed elsewhere


def _how(program: Program) -> str:
    code = program.process.returncode
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
