"""The run that a working directory holds: who may write there, and what it goes on from."""
