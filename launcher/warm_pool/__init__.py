"""The warm pool of a user: `ddp-launch` forks its ranks from a template that an earlier command has left.

Theory of operation
-------------------
Most of the start of a job is the import of torch. Within a job, the zygote imports it once (`launcher.template`).
Between jobs, a template does: a process that has imported torch for one script, and waits at a socket in a private
folder of the user. `ddp-launch warm start` turns the pool on. Then each command does this, before anything else:

1. `surroundings` reads what a rank would inherit from the command, and makes the key of it.
2. `client` connects to the template of this key, and sends its environment and its standard streams. A fork of the
   template becomes the zygote of the command. From there on, all is as usual, but for the parent of the zygote
   (`launcher/template/pooled.py`).
3. Without such a template the command starts cold, and `seed` leaves a process that becomes the template when the
   command has ended. So the template inherits from the command what cannot be set later.

There is no other process: the pool is its folder and its templates. Whatever goes wrong, the command starts cold.
"""
