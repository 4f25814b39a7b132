"""What a rank reports about itself: its status page, wrappers of torch's functions, its guard thread, and its errors.

Only `comm_error` imports torch at load time. The launcher loads this folder by path, under another name, because a
script may have its own module named `ddp`. So the modules that the launcher needs import each other relatively.
"""
