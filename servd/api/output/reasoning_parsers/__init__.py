"""Reasoning parsers, a file per model family, chosen by chat template or --reasoning-parser."""
