"""idemgate and Kafka: consumers of aiokafka or confluent-kafka that run each record once, and topics sent to Kafka."""

from __future__ import annotations

from idemgate_kafka.consumer import KafkaConsumer
from idemgate_kafka.message import KafkaMessage
from idemgate_kafka.sender import KafkaSender

__all__ = ["KafkaConsumer", "KafkaMessage", "KafkaSender"]

__version__ = "0.1.0"
