"""Apache Kafka through kafka-python; only this package imports it."""
