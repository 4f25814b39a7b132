"""What a rank reports about itself: its status page, marks on torch's functions, its guard, and its errors.

No module but `comm_error` imports torch when it is loaded. The launcher loads this folder by path, under another
name, because a script may have a module named `ddp` of its own: the modules that it needs import each other relatively.
"""
