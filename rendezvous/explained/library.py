"""Codes 7 and 8: errors of the library `ddp` in a rank."""

from __future__ import annotations

from rendezvous.explained.entry import Entry
from rendezvous.values.error_codes import Code

ENTRIES = (
    Entry(
        Code.COMMUNICATION_FAILED,
        "A collective failed, because another rank or a connection failed.",
        ("The other rank ended: its own error is the cause.", "The network between two nodes failed."),
        ("Look for the rank that the job names as the first cause: `ddpctl why JOB`.",),
        "CommError: all_reduce #412: rank 3 has closed its connection",
        "communication-errors",
    ),
    Entry(
        Code.CANNOT_FORM_GROUP,
        "A process group cannot be formed.",
        (
            "A variable such as RANK or WORLD_SIZE is missing or wrong: the script was not started by a launcher.",
            "The backend is not available for the device.",
        ),
        (
            "Start the script with `ddp-launch script.py`.",
            "Read which variable or backend the message names.",
        ),
        "InitError: RANK is not set. Start the script with ddp-launch.",
        "ddp",
    ),
    Entry(
        Code.COMMUNICATES_BEFORE_RUN,
        "A rank that joins a running job has communicated before `State.run`.",
        (
            "Between the start of the script and State.run there is a collective that the other ranks do not repeat.",
        ),
        ("Move the collective into the function that State.run calls, or use --recover restart.",),
        "JoiningError: rank 3 communicates before state.run: dist.broadcast at train.py:17",
        "elastic",
    ),
    Entry(
        Code.CANNOT_REFORM,
        "A rank cannot form its process groups again after a failure of another rank.",
        (
            "A group was made in a way that cannot be repeated, or a backend does not support it.",
            "A model in shards cannot go on: torch cannot reset it, or its rank has changed.",
            "A shard of the state is lost, and no commit has it.",
        ),
        (
            "Nothing: the job restarts all ranks instead. The message names the group, the model or what is missing.",
        ),
        "CannotReform: the group 'moe' was made with pg_options that cannot be repeated",
        "elastic",
    ),
    Entry(
        Code.NUMBERS_NOT_FINITE,
        "Gradients or parameters are not finite, or differ between the ranks.",
        (
            "The learning rate is too high, or a division by zero.",
            "A rank uses another seed or other weights.",
        ),
        ("The report names the parameter, the rank and the step where it began.",),
        "NumericsError: step 12: layer2.weight.grad is not finite on rank 1",
        "ddp",
    ),
    Entry(
        Code.WRONG_ARGUMENT,
        "An argument of a function of `ddp` has a wrong value or type.",
        ("The message names the argument and what it accepts.",),
        ("Correct the call.",),
        "ValueError: bucket_cap_mb must be above 0, or 'auto'",
        "ddp",
    ),
    Entry(
        Code.WRONG_USE,
        "A function of `ddp` was called at a time or in a way that is not possible.",
        ("For example, a module was changed after it was wrapped, or a call is missing before this one.",),
        ("Do what the end of the message says.",),
        "RuntimeError: the parameters of the module have changed since it was wrapped",
        "ddp",
    ),
    Entry(
        Code.CHECKPOINT_UNREADABLE,
        "A checkpoint cannot be read.",
        ("It is incomplete, damaged, or of another model.", "Another program wrote it in an unknown format."),
        ("`python -m ddp.elastic verify FOLDER` checks it. Use an earlier one, or the right model.",),
        "CheckpointError: ckpt/.metadata is not a checkpoint of torch.distributed.checkpoint",
        "elastic",
    ),
    Entry(
        Code.COMMIT_FAILED,
        "A commit could not be written.",
        ("The disk is full, or the folder cannot be written.", "The object store rejects the write."),
        ("Free some space, or name another folder.", "Training can continue: the next commit tries again."),
        "CommitError: cannot write commit 12 to /data/ckpt: No space left on device",
        "elastic",
    ),
    Entry(
        Code.NO_SPACE_FOR_COMMITS,
        "There is no memory or folder for commits in memory.",
        ("/dev/shm is full, or too small for the state of the ranks.",),
        ("Raise the size of /dev/shm: `docker run --shm-size`, or sizeLimit of an emptyDir.",),
        "ScratchError: cannot reserve 8.0 GiB in /dev/shm: No space left on device",
        "elastic",
    ),
    Entry(
        Code.COMMIT_DAMAGED,
        "A part of a commit is damaged.",
        ("A file was changed or truncated after it was written.", "A disk or memory error."),
        ("Nothing, if there is an earlier commit: it is used. Check the disk of the node.",),
        "DamagedImage: part 3 of commit 12: the checksum does not match",
        "elastic",
    ),
)
