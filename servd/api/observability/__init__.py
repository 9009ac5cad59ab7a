"""What servd reports of its requests: latency breakdowns, timelines, spans, logs and audits."""
