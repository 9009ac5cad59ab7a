"""Queues of waiting requests: one file per --scheduling-policy, each with an `AdapterQueue`."""

QUEUES = "servd.core.queues"
