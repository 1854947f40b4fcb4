"""The server: a SuperLink that admits the clients whose keys lie in a folder, for as long as they lie there."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fairveil.deploy.folders import (
    ServerConfig,
    check_address,
    check_name,
    renew_certificate,
    server_config,
    write_flower_home,
)
from fairveil.deploy.keys import public_key_mark
from fairveil.deploy.programs import Program, Tell, flwr, new_text, require_flower, stopped_by_signals
from fairveil.errors import RunFault, UserError
from fairveil.store import hold, write_whole

START = 60.0  # seconds for the SuperLink to answer


def serve(folder: Path, allow: Sequence[Path], tell: Tell) -> None:
    """Run the server until Ctrl-C or SIGTERM.

    What Flower itself remembers (who is online, messages under way) lives in memory and ends with it. What must last
    lies in the folders of runs and of clients.

    Args:
        allow: public keys of clients, copied into the folder first.
        tell: takes what the user should know, a line at a time.

    Raises:
        UserError: not a server's folder, a server runs there already, a key is none, or the port is taken.
        RunFault: the SuperLink ended by itself.
    """
    require_flower()
    config = server_config(folder)
    with (folder / "lock").open("w") as lock:
        hold(lock, folder, "A server is running there.")
        for path in allow:
            _admit(folder, path)
        renew_certificate(folder, config.hosts)
        write_flower_home(folder, config)
        with stopped_by_signals(), (folder / "serve.log").open("ab") as log:
            link = Program(_command(folder, config), home=folder / "flower", log=log)
            try:
                _wait_until_ready(link, folder, config, log.tell())
                admitted = _Admitted(folder, tell)
                admitted.renew()
                tell(f"Ready: listening at {config.listen}, port {config.port}. Log: {folder}/serve.log. Ctrl-C stops.")
                while not link.ended:
                    time.sleep(1)
                    admitted.renew()
                raise RunFault(
                    f"The SuperLink ended by itself; {folder}/serve.log says why. What was finished is safe.\n"
                    f"  Go on with: fairveil deploy serve {folder}\n"
                    f"  and a run that was under way: fairveil deploy submit RUN --server {folder} --resume"
                )
            finally:
                link.stop()
                with suppress(OSError):
                    (folder / "registered.json").unlink()
        tell("Stopped.")


def _admit(folder: Path, path: Path) -> None:
    check_name(path.stem, f"--allow {path}: {path.stem}", "rename the file to NAME.pub")
    public_key_mark(path)
    target = folder / "clients" / f"{path.stem}.pub"
    if target.exists() and public_key_mark(target) != public_key_mark(path):
        raise UserError(
            f"--allow {path}: {path.stem} has another key here already.",
            f"{target} admits somebody under that name.",
            f"another name, or remove {target} first",
        )
    shutil.copyfile(path, target)


def _command(folder: Path, config: ServerConfig) -> list[str]:
    files = ("ssl-ca-certfile", "ca.crt"), ("ssl-certfile", "server.crt"), ("ssl-keyfile", "server.key")
    certificates = [part for option, name in files for part in (f"--{option}", str((folder / name).resolve()))]
    return [
        "fairveil.engine.flower", "superlink", *certificates, "--enable-supernode-auth",
        "--disable-runtime-dependency-installation", "--host", config.listen, "--port", str(config.port),
    ]  # fmt: skip


def _wait_until_ready(link: Program, folder: Path, config: ServerConfig, start: int) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        if link.ended:
            said = new_text(folder / "serve.log", start)
            if "address already in use" in said.lower():
                raise UserError(
                    f"{config.listen}, port {config.port}, is in use.",
                    "Another program listens there. Nothing was started.",
                    f"another port in {folder}/server.toml (the clients must know it too), or stop that program",
                )
            raise RunFault(f"The SuperLink did not start. {folder}/serve.log ends with:\n{said[-2000:].strip()}")
        with suppress(OSError), socket.create_connection(check_address(config.own_address, "listen"), 5):
            return
        time.sleep(0.1)
    raise RunFault(f"The SuperLink did not answer within {START:g} seconds; see {folder}/serve.log.")


class _Admitted:
    """The clients that are registered with the SuperLink: those whose keys lie in the folder."""

    def __init__(self, folder: Path, tell: Tell) -> None:
        self.folder, self.tell = folder, tell
        self.seen: object = None
        self.nodes: dict[str, dict[str, Any]] = {}  # by name: the mark of its key, and Flower's number for it

    def renew(self) -> None:
        """Register what is new in the folder, unregister what is gone from it."""
        paths = sorted((self.folder / "clients").glob("*.pub"))
        seen = [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths]
        if seen == self.seen:
            return
        self.seen = seen
        wanted = {}
        for path in paths:
            try:
                check_name(path.stem, str(path), "rename the file to NAME.pub")
                wanted[path.stem] = public_key_mark(path)
            except UserError as error:
                self.tell(str(error))
        for name, known in list(self.nodes.items()):
            if wanted.get(name) != known["key"]:
                flwr(self.folder / "flower", "supernode", "unregister", str(known["node"]), "here")
                del self.nodes[name]
                self.tell(f"{name} is no longer admitted.")
        for name, mark in wanted.items():
            if name not in self.nodes:
                self._register(name, mark)
        write_whole(self.folder / "registered.json", json.dumps(self.nodes, indent=2).encode())

    def _register(self, name: str, mark: str) -> None:
        path = self.folder / "clients" / f"{name}.pub"
        try:
            answer = flwr(self.folder / "flower", "supernode", "register", str(path), "here", "--name", name)
        except RunFault as fault:
            if "already in use" not in str(fault):
                raise
            twin = next((other for other, known in self.nodes.items() if known["key"] == mark), None)
            why = f"{twin} has the same key" if twin else "a key that was removed is admitted again by the next start"
            self.tell(f"{name} is not admitted: {why}.")
            return
        self.nodes[name] = {"key": mark, "node": str(answer["node-id"])}
        self.tell(f"{name} is admitted, by the key {mark}.")
