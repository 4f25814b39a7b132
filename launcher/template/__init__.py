"""The zygote: one template process per node, from which every rank is started.

Theory of operation
-------------------
The zygote owns the processes of its node; the agent only talks to it over one socket (`wire`).

*Warm.* The agent starts `python -u train.py ...`, exactly the command line of a rank, with our `hook/` folder
first on PYTHONPATH. The interpreter imports our `sitecustomize` as the last step of its own start-up, before it
has looked at the script: there we import torch and stay, in `loop`, forking one child per rank. A child simply
returns from `sitecustomize`, and the interpreter goes on to run the script as it would have anyway. So
`__main__`, `sys.argv`, `sys.path[0]`, `-m`, folders and zip files, tracebacks, the command line that `ps` shows
and the exit are the interpreter's own: there is nothing to imitate.

*Plain.* Where that cannot be had (another interpreter, no Python at all, `--no-warm-start`, a script whose
folder shadows what torch imports), the same loop runs in a small interpreter of its own and each child executes
its command. One loop serves both; they differ in what the child does after the fork. A Python child passes through
the same hook (`executed`), which leaves one thing behind: when the script imports torch, the marks of `tracing` follow,
as they do in a warm rank at its start.

*Nothing outlives the job.* The zygote is a child subreaper: whatever a rank leaves behind (double forks, new
sessions) becomes the zygote's child and is found by `tree`. When the agent dies, for whatever reason, the
socket closes and the zygote ends everything below it, then itself. When the zygote dies, ranks get SIGKILL by
their parent-death signal, what they leave falls to the agent, which is a subreaper too, and a cgroup, where the
system lets us have one, catches what both might miss.

The modules here are loaded under a private package name by path, never by searching `sys.path`, and import
nothing but the standard library: a script called `launcher.py` can neither break nor be hidden by them.
"""
