"""A job of three agents that say where they are in the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ports import free_port

if TYPE_CHECKING:
    from launched import Launch, Launched

_RANK = ("--no-python", "sh", "-c", "echo node rank $GROUP_RANK")
_SLURM = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"


def test_nodes_of_one_rack_get_neighbouring_ranks(launch: Launch) -> None:
    """Also without the pre-flight checks. The order inside a rack is the scheduler's."""
    where = ("--nnodes", "3", "--rendezvous", f"127.0.0.1:{free_port()}", "--rdzv-id", "places")

    def node(index: int, place: str, **env: str) -> Launched:
        words = (*where, "--nproc-per-node", "1", "--topology", place, "--preflight", "off")
        environ = {"SLURM_NODEID": str(index), "DDP_RENDEZVOUS_INSECURE": "1", **env}
        return launch(*words, *_RANK, env=environ)

    third = dict(zip(_SLURM, ("pod1.rack1.node2", "switch.switch.node"), strict=True))
    nodes = [node(0, "pod1/rack1"), node(1, "pod1/rack2"), node(2, "slurm", **third)]
    assert [each.wait() for each in nodes] == [0, 0, 0], [each.stderr() for each in nodes]
    ranks = [each.stdout().split("node rank ")[1].split()[0] for each in nodes]
    assert ranks == ["0", "2", "1"]
