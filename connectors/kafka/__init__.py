"""Apache Kafka through kafka-python: the only package that imports it."""
