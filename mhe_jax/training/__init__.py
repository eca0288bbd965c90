"""Training: `loop.train(config) -> result`, and what it consists of.

- `sharding`: the mesh, and which axis of an array is split over which axis of the mesh
- `optimizer`, `state`, `step`: one update, one evaluation, and what they change
- `stepper`: all steps, with validation and checkpoints; `meter`: their metrics and speed
- `tracking`: metrics.jsonl, progress, TensorBoard, W&B; `summary`: the result
- `checkpoint/`: on disk, whole or not at all
- `lock`, `resume`: whose a working directory is, and what may change in it
- `from_run`: a run that starts from another, or is made of one
- `distributed`: how processes meet; `group`: how they agree and stop
"""
