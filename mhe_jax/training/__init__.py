"""Training: mesh, optimizer, steps, checkpoints and the loop, `train(config) -> result`.

- `sharding`: the mesh, and which axis of an array is split over which axis of the mesh
- `optimizer`: AdamW, Adafactor, schedules
- `state`: what a step changes
- `step`: one update, one evaluation; `stepper`: all of them, with validation and checkpoints
- `checkpoint/`: on disk, whole or not at all
- `tracking`: metrics.jsonl and progress; `metric_writers`: TensorBoard, W&B; `curve`: the picture
- `meter`, `profile`: metrics of steps, their speed, and a trace
- `summary`: a run in one line before it, and in one JSON object after it
- `run/`: the working directory: `lock`, `resume`, and runs made from another (`warm_start`,
  `factorize`)
- `cluster/`: several processes: `distributed`, `meeting`, `group`; `signals` ask a run to stop
- `loop`: all of it together
"""
