"""Facts of the machine, as the kernel and its drivers report them."""
