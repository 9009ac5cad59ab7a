"""kv_transfer_params: lets one engine compute a prompt and another generate its output."""

import time

from servd.api.protocol.generation import KVTransferAnswer
from servd.base.errors import InvalidRequest
from servd.config import Config
from servd.config.kv_transfer import FLAG
from servd.messages.engine import RequestOptions

FIELD = "kv_transfer_params"


def check(options: RequestOptions, config: Config, num_prompts: int) -> None:
    """Check that this server can do the KV transfer of a request. Raise InvalidRequest if not. Only
    configured peers are read from: a client could otherwise name any host.
    """
    if (transfer := config.cache.kv_transfer_config) is None:
        raise InvalidRequest(f"`{FIELD}`: this server was started without {FLAG}", param=FIELD)
    if num_prompts > 1:
        raise InvalidRequest(f"`{FIELD}` needs exactly one prompt, got {num_prompts}", param=FIELD)
    if options.is_exported and not transfer.sends:
        raise InvalidRequest(f"`{FIELD}`: this server is a {transfer.kv_role}", param=FIELD)
    peers = transfer.kv_connector_extra_config.peers if transfer.receives else []
    if options.kv_source and options.kv_source not in peers:
        raise InvalidRequest(
            f"`{FIELD}`: {options.kv_source} is not among the peers of this server's {FLAG}",
            param=FIELD,
        )


def answer(config: Config, rank: int, request_id: str, num_tokens: int) -> KVTransferAnswer:
    """Return the parameters by which another engine finds the prompt of engine `rank`."""
    assert config.cache.kv_transfer_config is not None
    transfer = config.cache.kv_transfer_config.of_rank(rank)
    return KVTransferAnswer(
        remote_engine_id=transfer.engine_id or f"{transfer.kv_ip}:{transfer.kv_port}",
        remote_request_id=request_id,
        remote_host=transfer.kv_ip,
        remote_port=transfer.kv_port,
        remote_num_tokens=num_tokens,
        remote_block_size=config.cache.block_size,
        remote_blocks_expiry_time=time.time() + transfer.kv_connector_extra_config.keep,
        tp_size=config.parallel.tensor_parallel_size,
    )
