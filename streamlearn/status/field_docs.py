"""Descriptions of published rows."""

FIELD_DOCS = {"use_attribute_docstrings": True}
"""Pydantic configuration of rows that HTTP returns unchanged: docstrings become descriptions in OpenAPI."""
