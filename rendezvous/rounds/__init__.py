"""The decisions of `machine`: admission, ranks, sealing, failure policy, stops, snapshots and views. Pure."""
