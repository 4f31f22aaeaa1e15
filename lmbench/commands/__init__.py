"""The commands: a module each, imported when it is called."""

MEASURING = ("fit", "validate")

#: By name, what it does. `fit` and `validate` are `commands.fit`, every other one is a module of its name, with a
#: typed function of its name, or `run(args: list[str]) -> int`.
COMMANDS = {
    "fit": "measure training: forward, backward and optimizer times, memory, MFU",
    "validate": "measure inference on the validation data",
    "list": "what has been measured, the newest first; names for results",
    "show": "print a result again; alone, the newest",
    "fields": "what a number of a result means, and its unit",
    "sweep": "measure a grid of configurations, each in a process of its own",
    "report": "results as tables to paste, as CSV, or as one page with charts",
    "upload": "bring results to W&B, each exactly once",
    "board": "boards at W&B for each study, made or brought up to date",
    "compare": "is B slower than A? ratio with interval, and a verdict for CI",
    "noise": "how far a configuration is from itself: the floor that compare relies on",
    "kernels": "where the time went: kernels by phase, kind and part of the model",
    "memory": "where the memory goes: a recorded peak explained, or one to come predicted",
    "dtypes": "which dtype every tensor of a step had, and the reason for each cast",
    "nsys": "run a fit under Nsight Systems, limited to the profiled steps",
    "ceiling": "what matrix products and copies attain on this device, for kernels",
    "numerics": "how wrong a sum in 16 bit is, and when norms and softmax overflow",
    "overhead": "compare a bare loop, a plain Trainer and the harness",
    "completion": "the script for bash or zsh that completes all this with the Tab key",
    "selfcheck": "show that the numbers are true on this machine",
}
