"""Codes 2: joining the rendezvous, and calls to the service."""

from __future__ import annotations

from rendezvous.explained.entry import Entry
from rendezvous.values.error_codes import Code

_CHECK_SERVICE = "Check that the service or the job runs: `ddpctl --rendezvous HOST:PORT list`."
_NEW_TOKEN = "Create a new token with `ddp-rendezvous token`, and set DDP_RENDEZVOUS_TOKEN_FILE to its file."

ENTRIES = (
    Entry(
        Code.NO_RENDEZVOUS_ADDRESS,
        "The job has several nodes, and this node does not know where they meet.",
        ("--rendezvous is missing, and no scheduler names the nodes.",),
        ("Give every node the same --rendezvous HOST:PORT, where HOST is one of the nodes or a service.",),
        "ddp-launch: error: --nnodes 2: the address of the rendezvous is not known.",
        "rendezvous",
    ),
    Entry(
        Code.SERVICE_UNREACHABLE,
        "The rendezvous service does not answer.",
        (
            "The address is wrong, or nothing runs there yet.",
            "A firewall is between the machines.",
            "The connection was lost for longer than --join-timeout or --isolation-timeout permits.",
        ),
        (
            _CHECK_SERVICE,
            "Check the network between the nodes: `ddp-launch doctor --nnodes N --rendezvous HOST:PORT`.",
        ),
        "ddpctl: no answer from 127.0.0.1:29400: connection refused. Check --rendezvous, and that the service or "
        "the job runs",
        "rendezvous",
    ),
    Entry(
        Code.ADDRESS_UNUSABLE,
        "An address or interface of this node cannot be used.",
        ("The interface does not exist or has no address.", "The address belongs to another machine."),
        ("Use one of the interfaces that the message names.", "For a job on one machine, omit the option."),
        "ddp-launch: error: --interface eth9: this machine does not have this interface; use one of lo, eth0",
        "rendezvous",
    ),
    Entry(
        Code.CLIENT_SETTINGS_INVALID,
        "A setting for the connection to the service is wrong.",
        ("A DDP_RENDEZVOUS_ variable has a wrong value, or contradicts another one.",),
        ("Correct or unset the variable that the message names.",),
        "ddpctl: DDP_RENDEZVOUS_CERT_FILE and DDP_RENDEZVOUS_KEY_FILE must be set together: set both or neither",
        "security",
    ),
    Entry(
        Code.SECRET_UNUSABLE,
        "The secret of the job is missing or cannot be used.",
        (
            "A node runs the rendezvous for other nodes, and has no secret.",
            "The file is damaged, or other users can read it.",
        ),
        (
            "Create a secret with `ddp-rendezvous secret FILE`, copy it to every node, and use --secret-file FILE.",
            "Make it private: `chmod 600 FILE`.",
        ),
        "ddp-launch: error: refusing to use job.secret: it contains a secret, and other users have access to it. "
        "Run: chmod 600 job.secret",
        "security",
    ),
    Entry(
        Code.NOT_AUTHENTICATED,
        "The service does not know who calls.",
        (
            "The service requires a token, and none was sent.",
            "The token has expired, or another service created it.",
        ),
        (_NEW_TOKEN,),
        "ddpctl: this service requires a token: set DDP_RENDEZVOUS_TOKEN or DDP_RENDEZVOUS_TOKEN_FILE",
        "security",
    ),
    Entry(
        Code.NOT_PERMITTED,
        "The token does not permit this.",
        ("The token is for other jobs.", "Its role may only read jobs, or only join them."),
        ("Use a token with the role operator, agent or viewer that the call needs.", _NEW_TOKEN),
        "ddpctl: the token is valid for job team-a-*, not for job team-b-1",
        "security",
    ),
    Entry(
        Code.TLS_FAILED,
        "The encrypted connection to the service cannot be made.",
        (
            "The service and the client disagree on whether to use TLS.",
            "The certificate is from another authority, has expired, or is for another name.",
        ),
        ("Set DDP_RENDEZVOUS_CA_FILE to the certificate of the authority, or the secret of the job.",),
        "ddpctl: service:29400: the certificate of the service is not signed by an authority of ca.pem",
        "security",
    ),
    Entry(
        Code.REJECTED,
        "The service rejected this node.",
        (
            "A newer agent of this node has replaced this one.",
            "The node was drained or excluded, or its credentials are not accepted.",
        ),
        ("Read the reason. `ddpctl status JOB` shows the nodes of the job.",),
        "ddp-launch: the rendezvous rejected this agent: the token expired 40 s ago",
        "rendezvous",
    ),
    Entry(
        Code.NODES_DISAGREE,
        "This node has other options than the job.",
        ("The command was changed on some nodes only.", "Variables differ between the nodes."),
        ("Run the same command on every node. The message names the option and both values.",),
        "ddp-launch: --max-restarts is 3 in the job and 0 on node1",
        "rendezvous",
    ),
    Entry(
        Code.JOB_HAS_ENDED,
        "The job with this ID has ended.",
        ("An earlier run had the same --rdzv-id.", "This node came when the others had ended."),
        ("Use another --rdzv-id for a new run. `ddpctl status JOB` shows how the job ended.",),
        "ddp-launch: the job has ended: all ranks finished",
        "rendezvous",
    ),
    Entry(
        Code.NOT_SUPPORTED_BY_SERVICE,
        "The service does not know this call.",
        ("The service is older than the command.", "Another program listens at this address."),
        ("Update the service, or use the command of its release.",),
        "ddpctl: the service at node1:29400 does not support this command",
        "releases",
    ),
    Entry(
        Code.NO_SUCH_JOB,
        "The job is unknown, or the command does not say which of several jobs it means.",
        ("The ID has a typing error.", "No job runs, or several run and none is named."),
        ("Run `ddpctl list`, and name one of its jobs.",),
        "ddpctl: job 'trian' does not exist: `ddpctl list` shows the jobs",
        "ddpctl",
    ),
    Entry(
        Code.NOT_FOUND,
        "The job has no such rank, node, start of the ranks or value.",
        ("The number or the name is wrong, or belongs to another generation.",),
        ("Run `ddpctl status JOB` for its nodes and ranks.",),
        "ddpctl: job 'train' has no rank 9: its ranks are 0 to 3",
        "ddpctl",
    ),
    Entry(
        Code.NOT_POSSIBLE_NOW,
        "The job is not in a state in which this is possible.",
        ("It has ended.", "It has no ranks yet, because it waits for its nodes."),
        ("Look at `ddpctl status JOB`, and try again when the ranks run.",),
        "ddpctl: job 'train' has no ranks yet: it still waits for its nodes",
        "ddpctl",
    ),
    Entry(
        Code.LIMIT_REACHED,
        "A limit of the service is reached.",
        ("There are too many jobs, agents, streams or values.",),
        ("Try again when others have ended, or raise --max-jobs or --max-agents of the service.",),
        "ddpctl: the service already has 1000 jobs, which is the limit (--max-jobs)",
        "rendezvous",
    ),
    Entry(
        Code.REQUEST_INVALID,
        "The service rejects the arguments of the call.",
        ("A value is out of range, or not a value of this field.",),
        ("Correct the value that the message names.",),
        "ddpctl: job_id is empty",
        "ddpctl",
    ),
    Entry(
        Code.SERVICE_FAILED,
        "The service could not carry out the call.",
        ("Its store does not answer, or it has an internal error.",),
        ("Read the log of the service, and try again.",),
        "ddpctl: no answer from etcd at 10.0.0.1:2379",
        "operations",
    ),
    Entry(
        Code.COULD_NOT_START_TOGETHER,
        "The job ended before its ranks could run, or while it waited for nodes.",
        (
            "Fewer nodes than --nnodes joined within --join-timeout.",
            "A lost node was not replaced within --replacement-timeout.",
        ),
        ("Start the missing nodes, or raise the timeout.", "Check that all nodes use the same --rdzv-id."),
        "ddp-launch: the job failed: 1 of 2 nodes joined within 600 s",
        "rendezvous",
    ),
)
