"""How model families mark reasoning: one file each, by the template or --reasoning-parser."""
