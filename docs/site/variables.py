"""The environment variables that no table of the code describes. A test compares them with the code."""

from __future__ import annotations

# In the environment of the command, for the ranks.
OF_THE_LIBRARY = {
    "DDP_BACKEND": "the backend of `ddp.init()`, unless the call names one ([the backends](../collectives.md))",
    "DDP_TIMEOUT_S": "seconds that `ddp.init()` and collectives wait for other ranks, unless the call says it",
    "DDP_CHECK_NUMERICS": "`1` checks gradients for NaN and Inf, a larger number also compares the replicas every so "
    "many steps ([how](../ddp.md#find-nan-and-inf))",
    "DDP_NATIVE": "`0` loads nothing of the compiled core: Python code takes its place, and ranks have no status page",
    "DDP_DISABLE_COMM_MEM": "`0` puts buckets into memory that NCCL has registered, as for torch's own reducer",
    "DDP_HOST_KEY": "ranks with different values do not share memory, even on one host",
}

# The launcher sets them in each rank.
OF_A_RANK = {
    "DDP_JOB_ID": "the name of the job (`--rdzv-id`)",
    "DDP_GENERATION": "the number of this start of the ranks, from 1",
    "DDP_RESTART_COUNT": "the restarts so far",
    "DDP_RANK_DIR": "the folder with the logs of this rank in this generation",
    "DDP_SCRATCH": "a folder of the node, for all its ranks and generations; it is removed after the job",
    "DDP_CHECKPOINT_REQUEST": "the file that exists while a checkpoint is requested",
    "DDP_RESUME_PATH": "what ranks have saved with `ddp.on_failure` after the last failure",
    "DDP_RESUME_FILE": "the value of `--resume-file`",
    "DDP_REDUNDANCY": "the value of `--redundancy`",
    "DDP_TOPOLOGY": "the unit of `--topology` in which the node lies",
    "DDP_JOINS": "`1`: other ranks of this generation have kept their processes",
    "DDP_DEBUG": "what this rank does while a rank is debugged (`--debug`)",
    "DDP_STATUS_PAGE": "the file of the [status page](../status-page.md)",
    "DDP_STEP_PROFILE": "where a rank of [`ddp-launch plan`](../plan.md) leaves the profile of its steps",
    "DDP_STEP_PROFILE_STEPS": "how many steps it records",
    "DDP_REHEARSAL": "where a rank of [`ddp-launch rehearse`](../rehearse.md) records its steps",
    "DDP_SHARE_COMPILED": "the value of [`--share-compiled`](../compiled.md)",
    "DDP_GUARD": "the socket on which the rank reports errors of collectives",
}

# ddpctl and the agents read them.
OF_CLIENTS = {
    "DDP_RENDEZVOUS": "the services that `ddpctl` asks: `HOST:PORT,...`",
    "DDP_RENDEZVOUS_TOKEN": "the [token](../security.md)",
    "DDP_RENDEZVOUS_TOKEN_FILE": "a file with the token, which may be replaced while the client runs",
    "DDP_RENDEZVOUS_SECRET": "the secret of the job",
    "DDP_RENDEZVOUS_SECRET_FILE": "a file with the secret of the job, from `ddp-rendezvous secret`",
    "DDP_RENDEZVOUS_TLS": "`true` uses TLS; certificates of this list imply it",
    "DDP_RENDEZVOUS_CA_FILE": "the certificate authority of the service",
    "DDP_RENDEZVOUS_CERT_FILE": "the certificate of the client; together with `DDP_RENDEZVOUS_KEY_FILE`",
    "DDP_RENDEZVOUS_KEY_FILE": "the key of this certificate",
    "DDP_RENDEZVOUS_SERVER_NAME": "the name in the certificate of the service, if it differs from the host",
    "DDP_RENDEZVOUS_INSECURE": "`true` sends the token on connections without TLS",
}

# Beside the settings of `serve`.
OF_THE_SERVICE = {
    "DDP_RENDEZVOUS_CONFIG": "`--config`",
    "DDP_RENDEZVOUS_ETCD_PASSWORD": "the password of the user in the URL of `--store`",
}

# The launcher sets them for programs that it starts, other than ranks.
OF_PROGRAMS = {
    "DDP_LAUNCH_EVENT": "the kind of the event, for the command of `--on-event`",
    "DDP_CALL_FOLDER": "from `ddp.launch` to its ranks: the folder with the function",
    "DDP_ENDING_FILE": "from `ddp.launch` to the command: the file into which it writes how the job has ended",
    "DDP_SSH_CONTROL": "from `--hosts` to the agent of a host: its input is the control channel",
}
