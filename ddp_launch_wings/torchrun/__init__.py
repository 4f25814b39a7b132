"""The rendezvous under torch's own agent: `torchrun --rdzv-backend ddp --rdzv-endpoint HOST:PORT ...`.

Theory of operation
-------------------
torchrun finds `backend` through the entry point group `torchrun.handlers`. Its agent makes three calls. It joins and
waits for a world (`next_rendezvous`). At every monitor interval it asks whether it must join again
(`num_nodes_waiting`). It ends the rendezvous (`shutdown`), except when a signal ends torchrun. The calls do not contain
a reason. `node_state` translates the calls into the messages of an agent, without I/O. `backend` implements torch's
interface, and opens the TCPStore of each generation on node rank 0. `link` is the thread with the session.

    torch's agent                                       messages to the service
    next_rendezvous, first time                         AgentJoined
    next_rendezvous, without a request from us          RankFailed (a request to restart), AgentStopped
    next_rendezvous, after num_nodes_waiting was > 0    AgentStopped
    shutdown                                            RanksFinished
    shutdown while ChildFailedError is raised           RankFailed (final: the job ends), AgentStopped
    shutdown while another exception is raised          AgentLeft
    no shutdown: a signal ended torchrun                AgentLeft

    messages from the service                           torch's agent
    Assigned and StoreAt                                next_rendezvous returns
    Stop, Refused (retryable), a newer Assigned         num_nodes_waiting is 1: it stops its ranks and joins again
    Ended, Refused                                      next_rendezvous raises

torch's agent limits the restarts per node, as under c10d. `--rdzv-conf max_restarts=N` adds a limit of N for the whole
job. The service does not know the ranks of a torchrun job, since torch does not report their number: each node counts
as one rank. torch is imported only when torchrun calls `backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def backend() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The target of the entry point: return the function with which torch creates a rendezvous."""
    from ddp_launch_wings.torchrun.backend import create

    return create
