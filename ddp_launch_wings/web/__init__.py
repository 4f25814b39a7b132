"""The page: shows jobs in a browser, and lets operators control them (`ddp-rendezvous serve --web`)."""
