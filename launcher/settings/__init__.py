"""What was asked for: the table of options, its sources merged, checked, and put together into one `LaunchSpec`."""
