"""What `submit` starts on the server, but with draws and noise that a test can repeat."""

from pathlib import Path

from fairveil.deploy.federation import Federated, carry_out
from fairveil.engine.flower import client_app, server_app


class Seeded(Federated):
    def root(self, plan, store):
        return "test"


app = server_app(lambda grid, config: carry_out(grid, Path(config["folder"]), Seeded))
client = client_app()
