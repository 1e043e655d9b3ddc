"""What tests of traced modules share: proof that a graph ran, not the module's own code."""

from collections.abc import Iterator
from contextlib import contextmanager

from megasched.graph.capture import Graph


@contextmanager
def graphs_run() -> Iterator[list[Graph]]:
    """Collects the graphs that run inside, one entry a run."""
    ran: list[Graph] = []
    real = Graph.run

    def run(self, *args, **kwargs):
        ran.append(self)
        return real(self, *args, **kwargs)

    Graph.run = run
    try:
        yield ran
    finally:
        Graph.run = real
