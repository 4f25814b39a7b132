"""The version that agents of one job must share."""

VERSION = "0.1.0"
