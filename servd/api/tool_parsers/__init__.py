"""How model families write tool calls: one file each, chosen by the chat template or
--tool-call-parser.
"""
