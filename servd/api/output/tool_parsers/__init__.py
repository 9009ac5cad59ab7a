"""How model families write tool calls: one file each, by the template or --tool-call-parser."""
