"""The checks of options for a model and a machine: a file per section of Config."""
