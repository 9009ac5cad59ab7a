"""`servd bench NAME`: measurements, one file each with `add_options(parser)` and `run(arguments) ->
exit code`.
"""
