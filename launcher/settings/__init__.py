"""The options of `ddp-launch`: defines them, merges their sources, validates them and builds one `LaunchSpec`."""
