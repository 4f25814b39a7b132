"""The options of `ddp-launch`: definitions, merging of their sources, checks, and one `LaunchSpec` as the result."""
