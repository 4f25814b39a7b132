"""What each error code means, what causes it and what to do: for `ddpctl explain` and the pages of docs/errors."""
