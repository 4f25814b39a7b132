"""The rendezvous under torch's own agent: `torchrun --rdzv-backend ddp --rdzv-endpoint HOST:PORT ...`.

Theory of operation
-------------------
torchrun finds `backend` through the entry point group `torchrun.handlers`. Its agent knows four things: join and
wait for a world (`next_rendezvous`), ask every monitor interval whether it must come again (`num_nodes_waiting`),
and say goodbye (`shutdown`), which it leaves out when a signal ends it. It never says why it does what it does.
`standing` is the translation into the words of our agents, pure; `backend` is the thread that holds the session,
and the store that node rank 0 opens for each generation.

    torch's agent                                       what we say
    next_rendezvous, first time                         AgentJoined
    next_rendezvous, though nothing told it to come     RankFailed (a wish to restart), AgentStopped
    next_rendezvous, after num_nodes_waiting was > 0    AgentStopped
    shutdown                                            RanksFinished
    shutdown while ChildFailedError flies               RankFailed (a final one: the job ends), AgentStopped
    shutdown while another exception flies, or none     AgentLeft

    what we hear                                        torch's agent
    Assigned and StoreAt                                next_rendezvous returns
    Stop, Refused (retryable), a newer Assigned         num_nodes_waiting is 1: it stops its ranks and comes again
    Ended, Refused                                      next_rendezvous raises

How often to restart is torch's agent's own to decide, per node, as under c10d; `--rdzv-conf max_restarts=N` makes
it N for the whole job. The service knows no ranks of such a job, for torch tells nobody how many there are: each
node counts as one rank. This package alone of `rendezvous` imports torch, and only when torchrun calls `backend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def backend() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The target of the entry point: torch calls it, and gets what creates a rendezvous."""
    from rendezvous.torchrun.backend import create

    return create
