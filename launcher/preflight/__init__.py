"""Pre-flight: is this machine fit for the job, before it joins?

    quick   reads what the kernel, the driver and the file systems say; tens of milliseconds, while torch is imported
    full    lets CPU and GPUs work for a moment (a process of its own, with torch), then meets the other nodes: all
            measure the links between them in O(log n) rounds, and compare versions

Facts are gathered here, each in a thread of its own and none for longer than a bound: a disk or a driver that hangs
delays only that check. What facts mean is decided in `launcher.preflight.checkup`,
`launcher.preflight.gpu_checkup` and `launcher.preflight.link_plan`, which are pure.

An agent runs it and brings the result along when it joins (`NodeFacts.healthy`): the service leaves out a node that
failed. `ddp-launch doctor` runs the same and shows all of it. The meeting is a job of its own beside the one that is to
run (its id ends in `.preflight`), with an ordinary world, so that who is there, who is lost and who is late is
decided by the machine that decides it for every job.
"""
