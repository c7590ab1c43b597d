"""What all sections share: frozen, no unknown keys, and the check for addresses of this machine."""

import pytest
from pydantic import ValidationError

from streamlearn.settings.section import Section, is_loopback, section_type


class Small(Section):
    """A section of one key."""

    key: int = 1
    """Its only key."""


def test_a_section_is_frozen_and_refuses_unknown_keys() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Small().key = 2  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        Small(other=2)  # type: ignore[call-arg]


def test_a_section_is_found_in_an_annotation() -> None:
    assert section_type(Small) is section_type(Small | None) is Small
    assert section_type(int | None) is None


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),  # noqa: S104 - every address of the machine
        ("10.0.0.1", False),
        ("broker.example", False),
    ],
)
def test_loopback_addresses_are_recognized(host: str, expected: bool) -> None:
    """A name other than localhost is not resolved."""
    assert is_loopback(host) is expected
