"""The engine of many machines: the same tasks on a Flower federation. The only file that imports flwr.

Server: a ServerApp drives a run through the Grid. Client: a SuperNode (Flower's own process, which faces the network
and holds no records) takes messages, and the *door* carries them to the client's guard, see guard.py. The door is a
resident process: nothing is imported or loaded anew for a message, and the app that a server sends along, which Flower
would install and run on the client, is never even looked at. No code of a server's choice runs where records are.

Flower's processes are started through this file (`python -m fairveil.engine.flower superlink|supernode ...`), which
lets them wait less between looks at their queues, and lets a SuperLink take orders from its own machine only.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

LOOK = 0.1  # seconds between looks at a queue; Flower has 3 for messages and 0.5 for replies


def _brisk() -> Any:
    """The module `time` with a sleep that is never longer than LOOK."""
    brisk = SimpleNamespace(**{name: getattr(time, name) for name in dir(time) if not name.startswith("_")})
    brisk.sleep = lambda seconds: time.sleep(min(seconds, LOOK))
    return brisk


def supernode() -> None:
    """Flower's SuperNode, with the arguments of `flower-supernode`."""
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli.flower_supernode import flower_supernode

    start_client_internal.time = _brisk()
    flower_supernode()


def superlink() -> None:
    """Flower's SuperLink, with the arguments of `flower-superlink`.

    Flower answers whoever reaches the port: he could start an app of his own on the server, or register a key. Here all
    but the interface for clients, who prove their keys, is for processes of this machine.
    """
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    extensions.get_middleware = lambda: (Middleware(_OwnMachineOnly),)
    flower_superlink()


class _OwnMachineOnly:
    """Refuses (403) what is not for clients, unless it comes from the address that it goes to, or from loopback."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not scope["path"].startswith("/v1/fleet/"):
            (client, *_), (server, *_) = scope.get("client") or ("",), scope.get("server") or (None,)
            if client not in ("127.0.0.1", "::1", server):
                await send({"type": "http.response.start", "status": 403, "headers": []})
                await send({"type": "http.response.body", "body": b"only for processes of this machine"})
                return
        await self.app(scope, receive, send)


if __name__ == "__main__":
    process = {"superlink": superlink, "supernode": supernode}[sys.argv.pop(1)]
    process()
