"""`ddp.launch`: calls a function in every rank of a job, from a script, a REPL or a notebook.

There is no second launcher here. `launch` writes the function into a private folder and runs the command `ddp-launch`
with the program `ddp.launching.rank`. Each rank reads the function, calls it, and writes what it returned into the
folder. So a job of `launch` has the same agent, the same options and the same healing as any other job.

The calling process imports no torch. The function travels by value (cloudpickle) if it is defined in a script or a
notebook: ranks never run the script again, and it needs no guard `if __name__ == "__main__"`.
"""
