"""Training: `loop.train(config) -> result`, and what it consists of.

- `sharding`: the mesh, and which axis of an array is split over which axis of the mesh
- `optimizer`, `state`, `step`: one update, one evaluation, and what they change
- `stepper`: all steps, with validation and checkpoints; `meter`: their metrics and speed
- `tracking`: metrics.jsonl and progress; `metric_writers`: TensorBoard, W&B; `summary`: the result
- `checkpoint/`: on disk, whole or not at all
- `run/`: the working directory: `lock`, `resume`, runs made from another (`warm_start`, `fresh`)
- `cluster/`: several processes: `distributed`, how they meet; `group`, how they agree and stop
"""
