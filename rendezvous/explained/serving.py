"""Codes 3 and 4: running the service, and starting ranks on a node."""

from __future__ import annotations

from rendezvous.explained.entry import Entry
from rendezvous.values.error_codes import Code

ENTRIES = (
    Entry(
        Code.SERVICE_SETTING_INVALID,
        "A setting of `ddp-rendezvous` is invalid.",
        ("A flag, a DDP_RENDEZVOUS_ variable or a key of the file of --config has a wrong value.",),
        ("Correct the setting that the message names. `ddp-rendezvous serve --help` lists all settings.",),
        "ddp-rendezvous: invalid --history -1: use 0 or more",
        "rendezvous",
    ),
    Entry(
        Code.CANNOT_LISTEN,
        "The service cannot listen at this address.",
        ("Another process uses the port.", "The address does not belong to this machine."),
        ("Stop the other process, or use another --listen or --http.",),
        "ddp-rendezvous: cannot listen on 127.0.0.1:29400: Address already in use",
        "rendezvous",
    ),
    Entry(
        Code.SERVICE_UNPROTECTED,
        "Other machines could connect to the service without encryption or without a credential.",
        ("--listen is not an address of loopback, and TLS or authentication is missing.",),
        (
            "Set --tls-cert and --tls-key, and --token-keys or --client-ca.",
            "In a trusted network, use --insecure.",
        ),
        "ddp-rendezvous: 0.0.0.0:29400 is reachable from other machines without TLS (--tls-cert, --tls-key).",
        "security",
    ),
    Entry(
        Code.STORE_URL_INVALID,
        "The value of --store is not a store.",
        ("The kind of the store is unknown, or a part of its address is missing.",),
        ("Use memory, file:PATH, or etcd://HOST:PORT,.../PREFIX.",),
        "ddp-rendezvous: unknown store redis: use memory, file:PATH or etcd://HOST:PORT,.../PREFIX",
        "rendezvous",
    ),
    Entry(
        Code.STORE_UNUSABLE,
        "The store of the service cannot be used.",
        (
            "The file cannot be opened, or another process has locked it.",
            "etcd does not answer, or rejects the user.",
        ),
        ("Check the path or address of --store. Several replicas need etcd.",),
        "ddp-rendezvous: jobs.db is locked by process 4242: only one process can use a file store.",
        "rendezvous",
    ),
    Entry(
        Code.KEY_FILE_UNUSABLE,
        "The key file of the service cannot be used.",
        ("It does not exist, is empty, or has an invalid line.", "Other users can read it."),
        ("Create it with `ddp-rendezvous key FILE`, and make it private: `chmod 600 FILE`.",),
        "ddp-rendezvous: the key file keys is empty; `ddp-rendezvous key keys` adds a key",
        "security",
    ),
    Entry(
        Code.NO_DEVICES,
        "--nproc-per-node asks for devices that this node does not have.",
        (
            "The driver is not loaded, or the container does not show the devices.",
            "CUDA_VISIBLE_DEVICES hides them.",
        ),
        (
            "Check the devices, for example with `nvidia-smi`.",
            "Use a number of ranks, or --nproc-per-node cpu.",
        ),
        "ddp-launch: error: invalid --nproc-per-node 'gpu': this node has no visible GPU.",
        "gpu",
    ),
    Entry(
        Code.TOO_FEW_OPEN_FILES,
        "The limit on open files is too low for this number of ranks.",
        ("The agent needs some files for each rank, and the hard limit forbids it.",),
        ("Raise the hard limit (`ulimit -Hn`, LimitNOFILE of systemd), or start fewer ranks.",),
        "ddp-launch: error: --nproc-per-node '64': the agent needs 1,094 open files for 64 ranks, but the hard limit "
        "is 512.",
        "operations",
    ),
    Entry(
        Code.CANNOT_BIND_RANKS,
        "The ranks cannot be bound to CPUs as --numa-binding asks.",
        ("There are fewer GPUs or cores than ranks.", "The job may not use the CPUs next to a GPU."),
        ("Use --numa-binding node, start fewer ranks, or omit the option.",),
        "ddp-launch: error: --numa-binding exclusive: NUMA node 0 has only 2 usable physical cores for 4 ranks.",
        "placement",
    ),
    Entry(
        Code.PREFLIGHT_FAILED,
        "A check of this node, or of the network, failed before the ranks started.",
        ("A GPU, a disk, the memory or a link is unfit.",),
        ("Run `ddp-launch doctor`: it shows every check and what to do.",),
        "ddp-launch: error: the pre-flight check failed: shared memory: 64 MiB are too little.",
        "preflight",
    ),
    Entry(
        Code.CANNOT_START_RANKS,
        "This node cannot start its ranks.",
        (
            "A limit on processes is reached, or memory is short.",
            "The Python interpreter of the ranks cannot run.",
        ),
        ("Check `ulimit -u` and the free memory.", "Start the interpreter of PYTHON_EXEC by hand."),
        "ddp-launch: error: cannot start the process that starts the ranks (zygote): Cannot allocate memory.",
        "operations",
    ),
    Entry(
        Code.NO_WARM_TEMPLATE,
        "`ddp-launch warm` cannot keep a process for this script.",
        ("The ranks of this command are not forked from a process that has imported torch.",),
        ("Omit --no-python and --no-warm-start.",),
        "ddp-launch: error: no template of train: its ranks are not forked (--no-python, --no-warm-start)",
        "warm-pool",
    ),
    Entry(
        Code.HOST_FAILED,
        "The agent on a host of --hosts could not be started, or ended.",
        (
            "ssh cannot connect, or asks for a password.",
            "ddp-launch is not installed there, or not at the same path.",
        ),
        ("Run `ssh HOST true`. Then read the messages of the host above.",),
        "ddp-launch: error: node1: the ssh connection failed: Permission denied (publickey).",
        "deploy",
    ),
    Entry(
        Code.CANNOT_PROFILE,
        "`ddp-launch plan` has no profile of the script.",
        (
            "The script fails, or makes only a few training steps.",
            "Its parameters are sharded (fully_shard), or no optimizer of torch updates them.",
            "The file of --profile is damaged, or another release has written it.",
        ),
        (
            "Run the script with `ddp-launch --nproc-per-node 1` first. The message shows the end of its output.",
            "Profile the model without fully_shard.",
        ),
        "ddp-launch: error: train.py made fewer than 8 training steps with an optimizer of torch. Use a longer run.",
        "plan",
    ),
)
