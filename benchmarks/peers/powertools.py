"""AWS Lambda Powertools, idempotency: the cache persistence layer on redis-py. It blocks only."""

from __future__ import annotations

import os

os.environ.setdefault("AWS_LAMBDA_FUNCTION_NAME", "bench")

from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer
from redis import Redis

from benchmarks.peers.guarding import blocking
from benchmarks.peers.speak import RESULT, main, url

store = CachePersistenceLayer(client=Redis.from_url(url(), decode_responses=True))
config = IdempotencyConfig(event_key_jmespath="id", expires_after_seconds=86_400)


class Context:
    """What AWS hands to a handler: how long it may still run, which becomes the lease."""

    def get_remaining_time_in_millis(self) -> int:
        return 30_000


config.register_lambda_context(Context())


@idempotent_function(data_keyword_argument="asked", persistence_store=store, config=config)
def guarded(asked: dict[str, str]) -> str:
    return RESULT


if __name__ == "__main__":
    main(**blocking(lambda key: guarded(asked={"id": key})))
