"""Training: mesh, optimizer, steps, checkpoints and the loop, `train(config) -> result`.

- `distributed`, `meeting`, `group`: several processes meet, wait, stop and miss each other
- `sharding`: the mesh, and which axis of an array is split over which axis of the mesh
- `optimizer`: AdamW, Adafactor, schedules
- `state`: what a step changes
- `step`: one update, one evaluation
- `checkpoint`: on disk, whole or not at all
- `lock`: one process at a time in a directory
- `resume`: what a run finds in its directory: what may change, what stays
- `tracking`: metrics.jsonl, progress, TensorBoard, the picture
- `meter`, `profile`: numbers of steps, how fast they come, and a trace
- `signals`: what asks a run to save and stop
- `summary`: what a run is, before and after
- `loop`: all of it together
"""
