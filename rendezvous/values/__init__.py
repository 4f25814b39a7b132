"""The values that the parts of the rendezvous exchange: facts, events, effects and the state of a job."""
