"""Text on its way from the thread that owns the model."""

import threading

from streamlearn.jobs.queue import GenerationStart, GenerationStream
from tests.serve.doubles import KNOWN

START = GenerationStart(step=3, prompt_tokens=2, route=KNOWN)


def test_a_slow_reader_finds_several_pieces_as_one() -> None:
    """And nothing twice."""
    stream = GenerationStream(lambda: None)
    for piece in ("a", "b", "", "c"):
        stream.write(piece)
    assert (stream.take(), stream.take()) == ("abc", "")


def test_the_reader_is_told_of_every_change() -> None:
    """The start and each piece; an empty piece is no change."""
    told: list[GenerationStart | None] = []
    stream = GenerationStream(lambda: told.append(stream.start))
    stream.write("")
    assert told == []
    stream.begin(START)
    stream.write("a")
    assert told == [START, START]


def test_no_piece_is_lost_between_threads() -> None:
    """A writer that never waits, and a reader that takes what there is."""
    stream, found = GenerationStream(lambda: None), ""

    def write() -> None:
        for i in range(20_000):
            stream.write(f"{i} ")

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        found += stream.take()
    writer.join()
    assert found + stream.take() == "".join(f"{i} " for i in range(20_000))
