"""How model families mark their thoughts: one file each, chosen by the chat template or
--reasoning-parser.
"""
