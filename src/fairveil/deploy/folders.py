"""The folder of a server, and the folder of a client: what each machine keeps, made once and then edited by hand."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from fairveil.config import Section, read_toml
from fairveil.deploy.keys import LOCAL, certificate_mark, new_authority, new_certificate, new_node_key
from fairveil.errors import UserError
from fairveil.options import parse
from fairveil.store import write_whole

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")

SERVER = """\
# The server of a federation; `fairveil deploy serve` reads it when it starts.
hosts = [{hosts}]  # the names and addresses by which clients reach it; they are in its certificate
listen = "{listen}"{pad}# the address of this machine to listen at; 0.0.0.0: all of them
port = {port}
"""

CLIENT = """\
# A client of a federation; `fairveil deploy join` reads it when it starts.
name = "{name}"
server = "{server}"
group = ""                      # for fairness between groups of clients; the server is told it

[data]                          # which records: as in the config of a run, see docs/data.md
dataset = "file"
options = {{ path = "records.csv", client = "", target = "y", labels = [0, 1] }}  # path: from this folder
# client = "north"              # which client of the dataset this one is; needed only if it holds several
"""

POLICY = """\
# What this client allows, whatever a server asks for. Nothing in here is sent.
epsilon = 4.0                   # the largest budget, over all runs on this data together
delta = 1e-4                    # below 1 / (number of records)
adjacency = "add-remove"        # or "replace"
trust = "nobody"                # or "server": bounded shares without noise may go to the server, which adds it
# what may be computed; with trust = "server" also "bounded_update", "share_moments", for votes "neighbour_votes", or
# "train_teacher" and "teacher_votes"; for fair averages "weighed_update" (fedavg), "root_weighed_update" (root-loss),
# "fairly_clipped_update" (fair-fedavg), "powered_update" (q-fedavg), "follow_loss" (fairfed), or "split_update"
# (loss-split)
tasks = ["local_update", "fair_update", "choose_model", "personal_update", "release_moments"]
smallest_noise = 0.2            # noise multiplier; of votes: standard deviation, in votes
largest_clip = 10.0             # bound on what one record may contribute, and on a radius
open_choice = false             # true: the choice among models that may be any distance apart may show, at no price
largest_message = 100_000_000   # bytes
sizes = "rounded"               # how the number of records is declared: rounded down, or "public" (exact)
plugins = []                    # modules of your own with tasks; "module:Name" of models and features
"""


class ServerConfig(Section):
    """The file server.toml."""

    hosts: list[str] = Field(examples=[["fed.example.org"]])
    listen: str = "0.0.0.0"
    port: int = Field(9092, ge=1, le=65535)

    @property
    def own_address(self) -> str:
        """Where this machine itself finds the server."""
        return f"{'127.0.0.1' if self.listen == '0.0.0.0' else _bracketed(self.listen)}:{self.port}"


def init_server(folder: Path, hosts: Sequence[str], port: int) -> list[str]:
    """Make the folder of a server, with an authority and a certificate. Returns what to do next, line by line.

    Raises:
        UserError: it exists, or a host is not a name or an address.
    """
    for host in hosts:
        if not _is_host(host):
            raise UserError(
                f"--host {host} is neither a name nor an address.",
                "Clients look for the server under it, and its certificate holds it. Nothing was made.",
                "--host fed.example.org, or --host 192.0.2.7, without a port",
            )
    authority, authority_key = new_authority()
    _make(folder, "server")
    write_whole(folder / "ca.crt", authority)
    write_whole(folder / "ca.key", authority_key, mode=0o600)
    listen = "127.0.0.1" if set(hosts) <= set(LOCAL) else "0.0.0.0"
    listed, pad = ", ".join(f'"{host}"' for host in hosts), " " * max(1, 21 - len(listen))
    text = SERVER.format(hosts=listed, listen=listen, pad=pad, port=port)
    renew_certificate(folder, hosts)
    (folder / "clients").mkdir()
    write_whole(folder / "server.toml", text.encode())  # last: a folder that has it is whole
    write_flower_home(folder, server_config(folder))
    address = f"{_bracketed(hosts[0])}:{port}"
    return [
        f"Wrote {folder}. Keep it to yourself: whoever has ca.key or server.key can play the server.",
        f"Give {folder}/ca.crt to every client. Its fingerprint, to compare by telephone:",
        f"  {certificate_mark(folder / 'ca.crt')}",
        f"Each client runs: fairveil deploy init-client FOLDER --name NAME --server {address} --ca ca.crt",
        f"Put the NAME.pub that it sends back into {folder}/clients/: that admits it, before or while the server runs.",
        f"Start: fairveil deploy serve {folder}",
    ]


def init_client(folder: Path, name: str, server: str, authority: Path) -> list[str]:
    """Make the folder of a client, with its keys and its policy. Returns what to do next, line by line.

    Raises:
        UserError: it exists, or a name, an address or the certificate is not one.
    """
    check_name(name, f"--name {name}", "--name north-hospital")
    check_address(server, f"--server {server}")
    mark = certificate_mark(authority)
    private, public = new_node_key(name)
    _make(folder, "client")
    write_whole(folder / "ca.crt", authority.read_bytes())
    write_whole(folder / "node.key", private, mode=0o600)
    write_whole(folder / f"{name}.pub", public)
    write_whole(folder / "secret.key", secrets.token_hex(32).encode(), mode=0o600)
    write_whole(folder / "policy.toml", POLICY.encode())
    write_whole(folder / "client.toml", CLIENT.format(name=name, server=server).encode())
    return [
        f"Wrote {folder}. Keep it to yourself, and {folder}/secret.key above all: it is the key to the noise.",
        "The server is known by this certificate; compare its fingerprint with the server's keeper by telephone:",
        f"  {mark}",
        f"Send {folder}/{name}.pub to the server's keeper, who admits you by it.",
        f"Say where your records are in {folder}/client.toml, and what you allow in {folder}/policy.toml.",
        f"Start: fairveil deploy join {folder}",
    ]


def server_config(folder: Path) -> ServerConfig:
    """What server.toml says.

    Raises:
        UserError: this is not the folder of a server.
    """
    if not (folder / "server.toml").is_file():
        raise UserError(
            f"{folder} is not the folder of a server.",
            "It has no server.toml. Nothing was started.",
            f"fairveil deploy init-server {folder} --host NAME_OR_ADDRESS",
        )
    return parse(ServerConfig, read_toml(folder / "server.toml", "restore it as it was"))


def client_address(folder: Path) -> tuple[str, str]:
    """The name of a client, and the address of its server, as client.toml says.

    Raises:
        UserError: this is not the folder of a client, or one of the two is missing.
    """
    path = folder / "client.toml"
    if not path.is_file():
        raise UserError(
            f"{folder} is not the folder of a client.",
            "It has no client.toml. Nothing was started.",
            f"fairveil deploy init-client {folder} --name NAME --server HOST:PORT --ca ca.crt",
        )
    values = read_toml(path, "restore it as it was")
    name, server = str(values.get("name", "")), str(values.get("server", ""))
    check_name(name, f'{path}: name = "{name}"', 'name = "north-hospital"')
    check_address(server, f'{path}: server = "{server}"')
    return name, server


def check_name(name: str, what: str, fix: str) -> None:
    """Raise a UserError unless this can be the name of a client."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"{what} is not a name.",
            "A client's name has letters, digits, dots, dashes and underscores, and begins with a letter or a digit.",
            fix,
        )


def check_address(server: str, what: str) -> tuple[str, int]:
    """Host and port of a server.

    Raises:
        UserError: it is not an address.
    """
    host, _, port = server.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not _is_host(host) or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UserError(
            f"{what} is not an address.",
            "It is the server's name or address, a colon, and its port.",
            "fed.example.org:9092",
        )
    return host, int(port)


def renew_certificate(folder: Path, hosts: Sequence[str]) -> None:
    """A new certificate for the server under these names. Without the authority's key the old one stays."""
    if not (folder / "ca.key").exists():
        return
    try:
        certificate, key = new_certificate((folder / "ca.crt").read_bytes(), (folder / "ca.key").read_bytes(), hosts)
    except ValueError as error:
        raise UserError(
            f"{folder}/ca.crt and ca.key cannot be used: {error}.",
            "The server's certificate is made from them. Nothing was started.",
            "restore them as they were",
        ) from None
    write_whole(folder / "server.key", key, mode=0o600)
    write_whole(folder / "server.crt", certificate)


def write_flower_home(folder: Path, config: ServerConfig) -> None:
    """What Flower's commands read to find this server."""
    (folder / "flower").mkdir(exist_ok=True)
    text = (
        '[superlink]\ndefault = "here"\n\n[superlink.here]\n'
        f'address = "{config.own_address}"\nroot-certificates = "{(folder / "ca.crt").resolve()}"\n'
    )
    write_whole(folder / "flower" / "config.toml", text.encode())


def _make(folder: Path, what: str) -> None:
    """An empty folder that only its owner may enter."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(
                f"{folder} is not empty.",
                "It was left as it is: keys that were lost could not be made again.",
                f"another folder: fairveil deploy init-{what} my-{what} ...",
            )
        folder.chmod(0o700)
    except OSError as error:
        raise UserError(f"{folder} cannot be made.", f"{error.strerror}.", "a folder you may write to") from error


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return HOST_NAME.fullmatch(text) is not None
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
