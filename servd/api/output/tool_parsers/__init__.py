"""Tool parsers, a file per model family, chosen by chat template or --tool-call-parser."""
