"""Ways to run workers, one file each with `class Executor`; `--executor NAME` is the file name."""
