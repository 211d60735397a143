"""Runs examples/flower_fedcl.py in this process, without Ray.

It stands in for Flower's Grid, which carries messages. Node m + 1 is client m. Apart from who this
process is (TaskIdentity, of flwr 1.42), all names are of flwr's public interface.
"""

from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import Result
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid:
    """Gives each message to the client app at once; `trained` has the nodes of every round."""

    def __init__(self, client, clients: int):
        self.client = client
        self.trained = []
        self.contexts = {}
        for m in range(clients):
            node = {"partition-id": m, "num-partitions": clients}
            self.contexts[m + 1] = Context(1, m + 1, node, RecordDict(), {})

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, timeout=None):
        replies = []
        nodes = []
        for message in messages:
            node = message.metadata.dst_node_id
            replies.append(self.client(message, self.contexts[node]))
            nodes.append(node)
        if nodes:
            self.trained.append(nodes)
        return replies


def run(app, clients: int, rounds: int, n_0: int) -> tuple[LocalGrid, Result]:
    """A federation under these options of pyproject.toml."""
    TaskIdentity.run_id = 1
    TaskIdentity.node_id = 0
    TaskIdentity.task_id = 1
    grid = LocalGrid(app.client, clients)
    return grid, app.federate(grid, {"clients": clients, "rounds": rounds, "n-0": n_0})
