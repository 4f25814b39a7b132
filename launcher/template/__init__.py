"""The zygote: one template process per node, which starts every rank.

Theory of operation
-------------------
The zygote owns the processes of its node. The agent communicates with it over one socket only (`messages`).

*Warm.* The agent starts `python -u train.py ...`, exactly the command line of a rank, with the launcher's `hook/`
folder first on PYTHONPATH. The interpreter imports the hook's `sitecustomize` as the last step of its own start-up,
before it looks at the script. At this point the process imports torch and then runs `loop`, which forks one child per
rank. A child simply returns from `sitecustomize`, and the interpreter runs the script as usual. So `__main__`,
`sys.argv`, `sys.path[0]`, `-m`, folders and zip files, tracebacks, the command line in `ps` and the exit come from the
interpreter itself; the launcher does not emulate them.

*Plain.* If a warm start is not possible (another interpreter, no Python at all, `--no-warm-start`, a script whose
folder shadows what torch imports), the same loop runs in a small interpreter of its own, and each child executes its
command; so does the process that keeps the store. Both modes use the same loop. A Python child runs the same hook
(`script_start`), which installs one import hook: when the script imports torch, it instruments the functions of torch,
as it does in a warm rank at its start.

*Nothing outlives the job.* The zygote is a child subreaper: whatever a rank leaves behind (double forks, new sessions)
becomes the zygote's child, and `tree` finds it. When the agent dies, for whatever reason, the socket closes. The zygote
then kills all its descendants, and then exits. When the zygote dies, the ranks get SIGKILL by their parent-death
signal, and processes that they started become children of the agent, which is a subreaper too. If a cgroup can be
created, it also kills processes that neither of the two finds.

The interpreter loads the modules here from their path, under a private package name. They import only the
standard library. So a script called `launcher.py` can neither shadow these modules nor be shadowed by them.
"""
