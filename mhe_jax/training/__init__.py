"""Training: mesh, optimizer, steps, checkpoints and the loop, `train(config) -> result`.

- `sharding`: the mesh, and which axis of an array is split over which axis of the mesh
- `optimizer`: AdamW, Adafactor, schedules
- `state`: what a step changes
- `step`: one update, one evaluation; `stepper`: all of them, with validation and checkpoints
- `checkpoint/`: on disk, whole or not at all
- `tracking`: metrics.jsonl and progress; `metric_writers`: TensorBoard, W&B; `curve`: the picture
- `meter`: metrics of steps, their speed, and a trace
- `summary`: a run in one line before it, and in one JSON object after it
- `run/`: the working directory: `lock`, `resume`, runs made from another (`warm_start`, `fresh`)
- `cluster/`: several processes: `distributed`, how they meet; `group`, how they agree and stop
- `loop`: all of it together
"""
