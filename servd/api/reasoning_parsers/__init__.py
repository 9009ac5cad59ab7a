"""How model families mark their reasoning: one file each, chosen by the chat template or
--reasoning-parser.
"""
