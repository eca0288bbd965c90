"""Training: `loop.train(config) -> result`, and what it consists of.

- `sharding`: the mesh, and which axis of an array is split over which axis of the mesh
- `optimizer`, `state`, `step`: one update, one evaluation, and what they change
- `meter`: metrics of the steps, speed, and the result; `tracking`: who gets them
- `checkpoint/`: on disk, whole or not at all; `resume`: what a working directory holds
- `from_run`: a run that starts from another, or is made of one
- `distributed`: how processes meet; `group`: how they agree and stop
"""
