"""`ddp-launch plan`: predicts how a job would run on more nodes, from one profiled step and a model of the network.

Theory of operation. A few steps of the script run on this machine. Each rank records when its gradients are ready, and
how long the rest of a step takes (`ddp/telemetry/torch_marks.py`). From this profile, the model calculates a step of
any number of ranks:

- Gradients are put into buckets as DDP does it (`buckets`).
- Each bucket is reduced when it is complete and the bucket before it is finished. The duration comes from the latency
  and the bandwidth of the link, the number of nodes, and the algorithm (`network`).
- What remains after the last gradient is exposed. It makes the step longer (`step_model`).
- All ranks wait for the slowest one. With more ranks, the slowest one is slower (`stragglers`).
- Failures and checkpoints cost time between the steps (`failures`).

All of this is pure. A test plays the same job message by message, and checks the formulas with it.
"""
