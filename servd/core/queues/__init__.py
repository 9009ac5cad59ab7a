"""Queues of waiting requests: one file per --scheduling-policy, each with a `WaitingQueue`."""

QUEUES = "servd.core.queues"
