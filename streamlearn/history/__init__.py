"""The series behind the page: what happened along the stream, in bounded memory, as part of a snapshot."""
