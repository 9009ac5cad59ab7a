"""Queues of requests that wait to run: one file per --scheduling-policy, each with a
`WaitingQueue`.
"""

QUEUES = "servd.core.queues"
