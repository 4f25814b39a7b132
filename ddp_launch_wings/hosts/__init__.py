"""`--hosts`: one command that starts the agents of other machines over ssh."""
