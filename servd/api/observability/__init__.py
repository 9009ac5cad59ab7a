"""Reports about requests: latency breakdowns, timelines, spans, metrics, logs and audits."""
