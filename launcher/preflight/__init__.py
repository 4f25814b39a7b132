"""Pre-flight checks: whether this machine can run the job, before it joins.

    quick   reads data from the kernel, the driver and the file systems; takes tens of milliseconds, in parallel with
            the import of torch
    full    also runs a short load test on CPU and GPUs, in a separate process with torch; then all nodes measure the
            links between them in O(log n) rounds, and compare versions

The data is gathered here, each part in its own thread and with a time limit, so a disk or a driver that hangs delays
only its own check. `launcher.preflight.checkup` evaluates the data, without I/O.

An agent runs the checks and sends the result when it joins (`NodeFacts.healthy`). The service excludes a node that
failed. `ddp-launch doctor` runs the same checks and shows all results. To compare the nodes, they join a separate job
(its ID ends in `.preflight`). So the state machine of the service handles missing, lost and late nodes as in any job.
"""
