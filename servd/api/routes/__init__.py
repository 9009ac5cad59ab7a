"""The HTTP routes: one family per file, each with a `router`; files that start with an underscore
are shared.
"""
