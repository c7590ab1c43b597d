"""The error of a tracker."""

from streamlearn.errors import StreamlearnError


class TrackError(StreamlearnError):
    """A tracker cannot be written now; it is tried again."""
